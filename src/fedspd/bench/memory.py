"""Benchmark of a run's memory, in a fork, which has a peak of its own."""

import gc
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from fedspd.bench.results import FULL, BenchmarkResult, BenchmarkSize
from fedspd.config import load
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import Experiment, build_experiment
from fedspd.runtime.processes import Child, MemoryMeter, give_memory_back, resident_bytes

FEATURES, HIDDEN, CLASSES, EXAMPLES = 32, 600, 8, 4
ROUNDS = 2


def wide_network(method: str = "fedspd", clients: int = FULL.wide) -> Experiment:
    """Return an experiment with few examples and 100 kilobytes per client and cluster."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * (EXAMPLES + 2), FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, len(x))
    settings = [
        f"clients={clients}",
        f"rounds={ROUNDS}",
        f"data.examples={EXAMPLES}",
        "data.mixture=permutation",
        f"model.hidden={HIDDEN}",
        f"method={method}",
        "fedspd.align_every=2",
        "fedspd.final_epochs=1",
        "training.epochs=1",
        "training.first_round_factor=1",
    ]
    data = (x, y, x[: 2 * clients], y[: 2 * clients])
    return build_experiment(load(None, settings), data)


def measure_memory(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare the memory that a run of FedSPD adds at its peak with that of all centers."""
    experiment = wide_network(clients=size.wide)
    before, peak = run_bytes(experiment)
    yield BenchmarkResult.from_turns(
        "memory",
        "memory: peak of a run beside program and data over one model per client and cluster",
        [memory_factor(experiment, before, peak)],
        3.0,
        at_least=False,
        before=before,
        peak=peak,
    )


def memory_factor(experiment: Experiment, before: int, peak: int) -> float:
    """Return what a run adds over N x S x P."""
    plan = experiment.plan
    models = plan.clients * int(plan.algorithm.cluster_limit)
    return float((peak - before) / (models * plan.learner.size * plan.learner.dtype.itemsize))


def run_bytes(experiment: Experiment) -> tuple[int, int]:
    """Return the bytes of this process before all steps of a run and at their peak."""
    gc.collect()
    give_memory_back()
    with closing(Child("The run", partial(_run, experiment))) as child:
        added = child.receive()
    before = resident_bytes()
    return before, before + added


def _run(experiment: Experiment, connection: Connection) -> None:
    meter, engine = MemoryMeter(), Simulator(experiment.plan)
    engine.begin()
    for t in range(1, ROUNDS + 1):
        engine.round(t, experiment.topology.at(t))
        engine.measure()
    engine.finish(ROUNDS + 1)
    engine.measure()
    connection.send(meter.added_bytes())
