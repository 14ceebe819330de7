"""Bytes between two machines of a Ray cluster: the formula of docs/cluster.md and a measurement.

    python benchmarks/cluster_traffic.py

Both Ray nodes run on this machine: all their traffic crosses the loopback device, which counts it.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import fedspd
from fedspd.core.graph import Graph
from fedspd.engines.ray_cluster import RayCluster, joined_cluster, plan_transfers
from fedspd.experiment.build import Experiment, build_experiment
from fedspd.runtime.announcements import Announcements

SETTINGS = [
    "clients=20",
    "data.examples=60",
    "topology.degree=4",
    "training.epochs=1",
    "model.hidden=3000",
]
ROUNDS = 5


class PredictingCluster(RayCluster):
    """The engine, with the bytes that the formula predicts for its exchanges."""

    predicted = 0

    def _exchange(self, graph: Graph, announcements: Announcements) -> list[Announcements | None]:
        transfers = plan_transfers(graph, announcements, self.blocks)
        models = sum(len(transfer.client_T) for transfer in transfers)
        self.predicted += models * announcements.size * self.plan.learner.dtype.itemsize
        return super()._exchange(graph, announcements)


def loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[0])


def sent_during(action: Callable[[], Any]) -> int:
    """Return the bytes that crossed the loopback device during the action."""
    before = loopback_bytes()
    action()
    return loopback_bytes() - before


def main() -> None:
    experiment = build_experiment(fedspd.load(overrides=SETTINGS))
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    with joined_cluster(cluster.address, None), tempfile.TemporaryDirectory() as folder:
        show(experiment, Path(folder))
    cluster.shutdown()


def show(experiment: Experiment, folder: Path) -> None:
    plan, graph = experiment.plan, experiment.topology.at(1)
    engine = PredictingCluster(plan)
    engine.begin()
    model_bytes = plan.learner.size * plan.learner.dtype.itemsize
    sizes = " and ".join(str(len(block)) for block in engine.blocks)
    print(f"{plan.clients} clients, {len(graph.edges())} edges, shards of {sizes} clients")
    print(f"machines: {len(ray.nodes())}; bytes of a model: {model_bytes:,}")
    for t in range(1, ROUNDS + 1):
        engine.predicted = 0
        measured = sent_during(partial(engine.round, t, graph))
        models = engine.predicted // model_bytes
        sent = f"predicted {mb(engine.predicted)}, measured {mb(measured)}"
        print(f"round {t}, {models} models: {sent}")
    print(f"evaluation: {mb(sent_during(engine.measure))}")
    print(f"checkpoint: {mb(sent_during(partial(engine.save, folder)))}")
    print(f"ten seconds without a run: {mb(sent_during(partial(time.sleep, 10)))}")
    engine.close()


def mb(size: int) -> str:
    return f"{size / 1e6:.2f} MB"


if __name__ == "__main__":
    main()
