"""Benchmarks of complete runs: the overhead of a FedSPD round, and its growth with the clients.

Shapes: E examples, I channels, H height, W width, F features.
"""

import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedspd.bench import plain
from fedspd.bench.results import BenchmarkResult, BenchmarkSize
from fedspd.experiment.callbacks import Callback
from fedspd.experiment.runner import run
from fedspd.storage.atomic import Json

POOL_FACTOR = 1.25  # examples in the pool for each one that is assigned
FEW_EXAMPLES = 20  # of each client, if there are many clients
TEST_EXAMPLES = 500
Arrays = tuple[Tensor, Tensor, Tensor, Tensor]


class RoundTiming(NamedTuple):
    """The time of a round, since the end of the previous one."""

    round: int
    seconds: float
    processor: float  # seconds of this process on a core
    passes: float  # seconds of training and of losses


class RoundEnd(NamedTuple):
    """The clocks at the end of a round, and its event."""

    wall: float
    processor: float
    event: Json


class RoundClock(Callback):
    """The callback that notes the wall-clock and the processor time at the end of each round."""

    def __init__(self) -> None:
        self.ends: list[RoundEnd] = []

    def on_round(self, event: Json) -> None:
        self.ends.append(RoundEnd(time.perf_counter(), time.process_time(), event))


def measure_overhead(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare a FedSPD round with its training and loss passes.

    Records and checkpoints between two rounds count. Evaluations do not, because a run chooses how
    often it has them.
    """
    x_EIHW, y_E = plain.pixels(1, int(POOL_FACTOR * size.clients * size.examples))[0]
    data = (x_EIHW, y_E, x_EIHW[:TEST_EXAMPLES], y_E[:TEST_EXAMPLES])
    config = {
        "method": "fedspd",
        "clients": size.clients,
        "data": {"examples": size.examples},
        "topology": {"degree": min(6, size.clients - 1)},
        "model": {"name": "cnn"},
    }
    rounds = time_rounds(config, data, size.turns)
    yield BenchmarkResult.from_turns(
        "round",
        "a complete FedSPD round: seconds over those of its training and loss passes",
        [timing.seconds / timing.passes for timing in rounds],
        1.10,
        at_least=False,
        round=median(timing.seconds for timing in rounds),
        passes=median(timing.passes for timing in rounds),
    )


def measure_growth(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare the time per round and client of large networks with that of a small one.

    Processor time counts: the sizes cannot take turns, so other load would meet only one of them.
    """
    seconds = {
        clients: [t.processor / clients for t in time_rounds(*small_network(clients), size.turns)]
        for clients in size.growth
    }
    medians = {clients: median(each) for clients, each in seconds.items()}
    few, *larger = size.growth
    many = max(larger, key=lambda clients: medians[clients])
    yield BenchmarkResult.from_turns(
        "growth",
        f"growth: seconds per round and client with {many:,} clients over those with {few}",
        [each / medians[few] for each in seconds[many]],
        1.15,
        at_least=False,
        **{f"clients_{clients}": each for clients, each in medians.items()},
    )


def small_network(
    clients: int, hidden: int = 26, degree: int = 6, clusters: int = 2
) -> tuple[dict[str, Any], Arrays]:
    """Return a config and its data; with 26 hidden units a model has 1,960 parameters."""
    generator = torch.Generator().manual_seed(0)
    examples = int(POOL_FACTOR * clients * FEW_EXAMPLES)
    x_EF = torch.rand(examples, 64, generator=generator)
    y_E = torch.randint(plain.CLASSES, (examples,), generator=generator)
    config = {
        "method": "fedspd",
        "clients": clients,
        "clusters": clusters,
        "data": {"examples": FEW_EXAMPLES, "test_examples": 1, "mixture": "iid"},
        "topology": {"degree": degree},
        "model": {"name": "mlp", "hidden": hidden},
        "training": {"batch": 10, "epochs": 1},
    }
    return config, (x_EF, y_E, x_EF[:clients], y_E[:clients])


def time_rounds(config: Mapping[str, Any], data: Arrays, turns: int) -> list[RoundTiming]:
    """Run with one worker and return the timings of `turns` rounds.

    The first round, with doubled epochs, and the last one, with an evaluation, do not count.
    """
    clock = RoundClock()
    rounds = turns + 2
    run(
        {"rounds": rounds, "evaluate_every": rounds, "fedspd": {"final_epochs": 0}, **config},
        data=data,
        callbacks=[clock],
    )
    return [_timing(previous, end) for previous, end in pairwise(clock.ends[:-1])]


def _timing(previous: RoundEnd, end: RoundEnd) -> RoundTiming:
    seconds = end.event["seconds"]
    return RoundTiming(
        end.event["round"],
        end.wall - previous.wall,
        end.processor - previous.processor,
        seconds["train"] + seconds["losses"],
    )
