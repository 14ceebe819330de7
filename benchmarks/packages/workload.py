"""The workload of every contestant, and the line of JSON in which it reports its time."""

import json
import os
from functools import cache
from importlib.metadata import version

from torch import Tensor

from fedspd.bench import plain

CLIENTS, EXAMPLES = 20, 300
ROUNDS = int(os.environ.get("ROUNDS", "2"))  # that are timed


@cache
def data() -> list[tuple[Tensor, Tensor]]:
    return plain.pixels(CLIENTS, EXAMPLES)


def report(contestant: str, package: str, ends: list[float]) -> None:
    """Print the result from the times at which rounds ended.

    The first round includes the start of the simulator, so it is not timed.
    """
    result = {
        "contestant": contestant,
        "version": version(package),
        "seconds": ends[-1] - ends[0],
        "examples": (len(ends) - 1) * CLIENTS * EXAMPLES * plain.EPOCHS,
    }
    print(json.dumps(result))
