"""Benchmark of the network: a round of real peers on this machine and one of the simulator.

Shapes: E examples, I channels, H height, W width.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from fedspd.bench import plain
from fedspd.bench.results import BenchmarkResult, BenchmarkSize
from fedspd.bench.rounds import POOL_FACTOR, TEST_EXAMPLES, RoundClock
from fedspd.config import ExperimentConfig, validate
from fedspd.experiment.runner import run
from fedspd.node.host import local_network
from fedspd.node.host.local_network import NodeProcess

PEERS, WORKERS = 8, 2
TURNS_AT_MOST = 3
WARM_UP_ROUNDS = 2  # the first has doubled epochs, and both do things for the first time
POLL_SECONDS = 0.02


def measure_peers(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare a round of real peers with a round of the simulator.

    They alternate, so that other load on the machine meets both.
    """
    with tempfile.TemporaryDirectory(prefix="fedspd-") as folder:
        config = _config(size, Path(folder))
        turns = [
            (_time_peers(config, Path(folder) / f"{turn}"), _time_simulator(config))
            for turn in range(min(size.turns, TURNS_AT_MOST))
        ]
    peers, simulator = (median(seconds) for seconds in zip(*turns, strict=True))
    yield BenchmarkResult.from_turns(
        "peers",
        f"peers: seconds of a round of {PEERS} peers over those of the simulator with "
        f"{WORKERS} workers",
        [peers / simulator for peers, simulator in turns],
        1.5,
        at_least=False,
        peers=peers,
        simulator=simulator,
    )


def _config(size: BenchmarkSize, folder: Path) -> ExperimentConfig:
    x_EIHW, y_E = plain.pixels(1, int(POOL_FACTOR * PEERS * size.examples))[0]
    x_test, y_test = x_EIHW[:TEST_EXAMPLES], y_E[:TEST_EXAMPLES]
    path = folder / "pixels.npz"
    np.savez(path, x_train=x_EIHW, y_train=y_E, x_test=x_test, y_test=y_test)
    return validate(
        {
            "clients": PEERS,
            "rounds": WARM_UP_ROUNDS + max(3, size.turns),
            "evaluate_every": 1000,
            "data": {"name": str(path), "examples": size.examples},
            "topology": {"kind": "er", "degree": 3},
            "model": {"name": "cnn"},
            "method": "fedspd",
            "fedspd": {"final_epochs": 0},
        }
    )


def _time_simulator(config: ExperimentConfig) -> float:
    clock = RoundClock()
    run(config, workers=WORKERS, callbacks=[clock])
    ends = [(end.event["round"], end.wall) for end in clock.ends]
    return _seconds_per_round(ends, config.rounds)


def _time_peers(config: ExperimentConfig, folder: Path) -> float:
    """Return the seconds per round; a round ends when the last peer commits it."""
    ends: list[tuple[int, float]] = []

    def listen(nodes: Sequence[NodeProcess]) -> None:
        slowest = min(node.last.get("round", 0) for node in nodes)
        if slowest > (ends[-1][0] if ends else 0):
            ends.append((slowest, time.perf_counter()))

    local_network.create(config, folder)
    local_network.up(folder, config, listen, POLL_SECONDS)
    return _seconds_per_round(ends, config.rounds)


def _seconds_per_round(ends: Sequence[tuple[int, float]], last: int) -> float:
    """Return the median over rounds, without the warm-up and the last one, which has a test."""
    counted = [(round, end) for round, end in ends if WARM_UP_ROUNDS <= round < last]
    return median(
        (end - start) / (round - previous) for (previous, start), (round, end) in pairwise(counted)
    )
