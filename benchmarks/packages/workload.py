"""The workloads of every contestant, and the line of JSON in which it reports its time."""

import json
import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import NamedTuple

from torch import Tensor, nn

from fedspd.bench import plain


class Workload(NamedTuple):
    """A model, and how many clients train it on how many examples."""

    model: str  # its name in fedspd
    module: Callable[[], nn.Module]
    clients: int
    examples: int
    batch: int
    rounds: int  # that are timed
    epochs: int = plain.EPOCHS


WORKLOADS = {
    "cnn": Workload("cnn", plain.PlainCNN, 20, 300, plain.BATCH, 2),
    "small": Workload("mlp", plain.build_mlp, 200, plain.FEW_EXAMPLES, plain.SMALL_BATCH, 5),
}
WORKLOAD = WORKLOADS[os.environ.get("WORKLOAD", "cnn")]


@cache
def data() -> list[tuple[Tensor, Tensor]]:
    make = plain.pixels if WORKLOAD.model == "cnn" else plain.features
    return make(WORKLOAD.clients, WORKLOAD.examples)


def report(contestant: str, package: str, ends: list[float]) -> None:
    """Print the result from the times at which rounds ended.

    The first round includes the start of the simulator, so it is not timed.
    """
    examples = WORKLOAD.clients * WORKLOAD.examples * WORKLOAD.epochs
    result = {
        "contestant": contestant,
        "version": version(package),
        "seconds": ends[-1] - ends[0],
        "examples": (len(ends) - 1) * examples,
    }
    print(json.dumps(result))
