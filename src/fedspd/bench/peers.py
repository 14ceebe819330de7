"""What the network costs: a round of real peers on this machine against the same round of the simulator.

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
from fedspd.bench.rounds import POOL, RoundClock
from fedspd.bench.rows import BenchRow, Size
from fedspd.config import ExperimentConfig, validate
from fedspd.experiment.runner import run
from fedspd.node.host import local_network
from fedspd.node.host.local_network import NodeProcess

PEERS, WORKERS = 8, 2
FIRST = 2  # rounds that are left out: epochs are doubled in the first, and whatever is new is met in both
GLANCE = 0.02  # seconds between two looks at the peers


def rows(size: Size) -> Iterator[BenchRow]:
    """By turns, so that whatever else the machine does meets both."""
    with tempfile.TemporaryDirectory(prefix="fedspd-") as folder:
        config = _config(size, Path(folder))
        turns = [
            (_of_peers(config, Path(folder) / f"{turn}"), _simulated(config))
            for turn in range(min(size.turns, 3))
        ]
    peers, simulated = (median(seconds) for seconds in zip(*turns, strict=True))
    what = f"peers: seconds of a round of {PEERS} peers over those of the simulator with {WORKERS} workers"
    yield BenchRow.of(
        "peers",
        what,
        [one / other for one, other in turns],
        1.5,
        False,
        peers=peers,
        simulator=simulated,
    )


def _config(size: Size, folder: Path) -> ExperimentConfig:
    x_EIHW, y_E = plain.pixels(1, int(POOL * PEERS * size.examples))[0]
    np.savez(
        folder / "pixels.npz", x_train=x_EIHW, y_train=y_E, x_test=x_EIHW[:500], y_test=y_E[:500]
    )
    tree = {
        "clients": PEERS,
        "rounds": FIRST + max(3, size.turns),
        "evaluate_every": 1000,
        "data": {"name": str(folder / "pixels.npz"), "examples": size.examples},
        "topology": {"kind": "er", "degree": 3},
        "model": {"name": "cnn"},
        "fedspd": {"final_epochs": 0},
    }
    return validate(tree)


def _simulated(config: ExperimentConfig) -> float:
    clock = RoundClock()
    run(config, workers=WORKERS, callbacks=[clock])
    ends = [(event["round"], at) for at, _, event in clock.rounds]
    return _seconds_per_round(ends, config.rounds)


def _of_peers(config: ExperimentConfig, folder: Path) -> float:
    """A round is done when the last peer has committed it."""
    said: list[tuple[int, float]] = []

    def listen(nodes: Sequence[NodeProcess]) -> None:
        slowest = min(node.last.get("round", 0) for node in nodes)
        if slowest > (said[-1][0] if said else 0):
            said.append((slowest, time.perf_counter()))

    local_network.create(config, folder)
    local_network.up(folder, config, listen, GLANCE)
    return _seconds_per_round(said, config.rounds)


def _seconds_per_round(said: Sequence[tuple[int, float]], last: int) -> float:
    """The last round has a test, and is left out too."""
    counted = [(round, at) for round, at in said if FIRST <= round < last]
    return median(
        (now - before) / (round - earlier) for (earlier, before), (round, now) in pairwise(counted)
    )
