"""What really goes between two machines of a Ray cluster, against the formula of docs/cluster.md: python benchmarks/cluster_traffic.py

Both machines are this one, so that whatever they say to each other crosses the loopback device, whose bytes are counted.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import fedspd
from fedspd.core.graph import Graph
from fedspd.engines.ray_cluster import RayCluster, joined_cluster, plan_transfers
from fedspd.experiment.build import build_experiment
from fedspd.runtime.announcements import Announcements

SETTINGS = [
    "clients=20",
    "data.examples=60",
    "topology.degree=4",
    "training.epochs=1",
    "model.hidden=3000",
]
ROUNDS = 5


class Counting(RayCluster):
    """Adds up what the formula says of every exchange."""

    predicted = 0

    def _exchange(self, graph: Graph, header: Announcements) -> list[Announcements | None]:
        models = sum(len(parcel.client_T) for parcel in plan_transfers(graph, header, self.blocks))
        self.predicted += models * header.size * self.plan.learner.flat.element_size()
        return super()._exchange(graph, header)


def looped() -> int:
    (line,) = [
        line
        for line in Path("/proc/net/dev").read_text().splitlines()
        if line.strip().startswith("lo:")
    ]
    return int(line.split(":")[1].split()[0])


def counted(action: Callable[[], Any]) -> int:
    before = looped()
    action()
    return looped() - before


def main() -> None:
    experiment = build_experiment(fedspd.load(overrides=SETTINGS))
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    with joined_cluster(cluster.address, None), tempfile.TemporaryDirectory() as folder:
        show(experiment, Path(folder))
    cluster.shutdown()


def show(experiment: Any, folder: Path) -> None:
    plan, graph = experiment.plan, experiment.topology.at(1)
    engine = Counting(plan)
    engine.begin()
    model = plan.learner.size * plan.learner.flat.element_size()
    sizes = " and ".join(str(len(block)) for block in engine.blocks)
    print(f"{plan.clients} clients, {len(graph.edges())} edges, shards of {sizes} clients")
    print(f"machines: {len(ray.nodes())}; bytes of a model: {model:,}")
    for t in range(1, ROUNDS + 1):
        before = engine.predicted
        found = counted(lambda t=t: engine.round(t, graph))
        said = engine.predicted - before
        print(
            f"round {t}: formula {said / 1e6:7.2f} MB ({said // model} models), measured {found / 1e6:7.2f} MB"
        )
    print(
        f"evaluation: {counted(engine.measure) / 1e6:.2f} MB; checkpoint: {counted(lambda: engine.save(folder)) / 1e6:.2f} MB"
    )
    print(f"ten seconds of silence: {counted(lambda: time.sleep(10)) / 1e6:.2f} MB")
    engine.close()


if __name__ == "__main__":
    main()
