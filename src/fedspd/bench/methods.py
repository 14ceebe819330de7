"""Benchmark of FedSPD-Split: a round of it over one of FedAvg, on the same clients.

A round is training, exchange, averaging and the loss of every example, from which FedSPD-Split has
its posterior r. The final phase does not count. Processor seconds count.
"""

import time
from collections.abc import Iterator
from itertools import count
from statistics import median

from fedspd.bench import plain
from fedspd.bench.results import BenchmarkResult, BenchmarkSize, TimedTask, time_in_turns
from fedspd.bench.rounds import POOL_FACTOR, TEST_EXAMPLES, Arrays
from fedspd.config import validate
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import build_experiment

ROUNDS_AT_MOST = 100  # so that all timed rounds are in the first half, where bodies meet all others
WARM_UP = 1


def measure_methods(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare rounds of FedSPD-Split after its split with rounds of FedAvg."""
    x_EIHW, y_E = plain.pixels(1, int(POOL_FACTOR * size.clients * size.examples))[0]
    data = (x_EIHW, y_E, x_EIHW[:TEST_EXAMPLES], y_E[:TEST_EXAMPLES])
    tasks = [rounds_of(method, size, data) for method in ("fedspd-split", "fedavg")]
    turns = time_in_turns(tasks, size.turns)
    split, fedavg = (median(seconds) for seconds in zip(*turns, strict=True))
    yield BenchmarkResult.from_turns(
        "split",
        "FedSPD-Split with two clusters: processor seconds of a round over those of FedAvg",
        [s / f for s, f in turns],
        1.15,
        at_least=False,
        split=split,
        fedavg=fedavg,
    )


def rounds_of(method: str, size: BenchmarkSize, data: Arrays) -> TimedTask:
    """Return a task that runs the next round; the split is over before the first one."""
    config = {
        "method": method,
        "clients": size.clients,
        "rounds": ROUNDS_AT_MOST,
        "data": {"examples": size.examples},
        "topology": {"degree": min(6, size.clients - 1)},
        "model": {"name": "cnn"},
    }
    if method == "fedspd-split":
        config |= {"clusters": 2, "fedspd-split": {"warmup": WARM_UP}}
    experiment = build_experiment(validate(config), data)
    engine, numbers = Simulator(experiment.plan), count(1)
    engine.begin()

    def run_round() -> float:
        t = next(numbers)
        started = time.process_time()
        engine.round(t, experiment.topology.at(t))
        return time.process_time() - started

    for _ in range(WARM_UP):
        run_round()
    return run_round
