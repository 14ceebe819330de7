"""Whole runs: what a FedSPD round costs besides its training and its losses, and how a round grows with the clients.

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
from fedspd.bench.rows import BenchRow, Size
from fedspd.experiment.callbacks import Callback
from fedspd.experiment.runner import run
from fedspd.storage.atomic import Json

POOL = 1.25  # examples in the pool for each one that is dealt
FEW = 20  # examples of a client where clients are many
Arrays = tuple[Tensor, Tensor, Tensor, Tensor]


class Timed(NamedTuple):
    """A round of a run, from the end of the one before it."""

    round: int
    seconds: float
    processor: float  # seconds that it worked for us
    passes: float  # seconds of training and of losses


class RoundClock(Callback):
    """The callback that notes the wall-clock and the processor time at the end of each round."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, float, Json]] = []

    def on_round(self, event: Json) -> None:
        self.rounds.append((time.perf_counter(), time.process_time(), event))


def overhead_rows(size: Size) -> Iterator[BenchRow]:
    """Everything that a run does between two rounds is counted, records and checkpoints included; tests of the clients
    are not, since a run chooses how often it wants them."""
    x_EIHW, y_E = plain.pixels(1, int(POOL * size.clients * size.examples))[0]
    config = {
        "clients": size.clients,
        "data": {"examples": size.examples},
        "topology": {"degree": min(6, size.clients - 1)},
        "model": {"name": "cnn"},
    }
    rounds = timed_rounds(config, (x_EIHW, y_E, x_EIHW[:500], y_E[:500]), size.turns)
    what = "a whole FedSPD round: seconds over those of its training and loss passes"
    numbers = {
        "round": median(timed.seconds for timed in rounds),
        "passes": median(timed.passes for timed in rounds),
    }
    yield BenchRow.of(
        "round", what, [timed.seconds / timed.passes for timed in rounds], 1.10, False, **numbers
    )


def growth_rows(size: Size) -> Iterator[BenchRow]:
    """Counted in seconds of the processor: the sizes cannot take turns, and whatever else the machine does would meet one alone."""
    seconds = {
        N: [timed.processor / N for timed in timed_rounds(*small_network(N), size.turns)]
        for N in size.growth
    }
    numbers = {f"clients_{clients}": median(each) for clients, each in seconds.items()}
    few, many = size.growth[0], max(size.growth[1:], key=lambda clients: median(seconds[clients]))
    what = f"growth: seconds per round and client with {many:,} clients over those with {few}"
    yield BenchRow.of(
        "growth", what, [s / median(seconds[few]) for s in seconds[many]], 1.15, False, **numbers
    )


def small_network(
    clients: int, hidden: int = 26, degree: int = 6, clusters: int = 2
) -> tuple[dict[str, Any], Arrays]:
    """A config and its data: with the usual 26 hidden units a model has 1,960 parameters."""
    generator = torch.Generator().manual_seed(0)
    examples = int(POOL * clients * FEW)
    x_EF, y_E = (
        torch.rand(examples, 64, generator=generator),
        torch.randint(plain.CLASSES, (examples,), generator=generator),
    )
    config = {
        "clients": clients,
        "clusters": clusters,
        "data": {"examples": FEW, "test_examples": 1, "mixture": "iid"},
        "topology": {"degree": degree},
        "model": {"name": "mlp", "hidden": hidden},
        "training": {"batch": 10, "epochs": 1},
    }
    return config, (x_EF, y_E, x_EF[:clients], y_E[:clients])


def timed_rounds(config: Mapping[str, Any], data: Arrays, turns: int) -> list[Timed]:
    """`turns` rounds with one worker; before them comes one with doubled epochs, after them one with a test."""
    clock = RoundClock()
    rounds = turns + 2
    run(
        {"rounds": rounds, "evaluate_every": rounds, "fedspd": {"final_epochs": 0}, **config},
        data=data,
        callbacks=[clock],
    )
    return [_timed(*before, *now) for before, now in pairwise(clock.rounds[:-1])]


def _timed(
    at: float, worked: float, before: Json, now: float, working: float, event: Json
) -> Timed:
    return Timed(
        event["round"],
        now - at,
        working - worked,
        event["seconds"]["train"] + event["seconds"]["losses"],
    )
