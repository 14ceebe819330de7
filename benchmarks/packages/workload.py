"""The workloads of every contestant, its clock, and the line of JSON in which it reports."""

import json
import os
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
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


class RoundEnd(NamedTuple):
    """When a round ended, by the clock and by the processor seconds of all processes so far."""

    clock: float
    processor: float


def end_round() -> RoundEnd:
    """Return the time now."""
    return RoundEnd(time.perf_counter(), processor_seconds(os.getpid()))


def processor_seconds(root: int) -> float:
    """Return the processor seconds of a process and its descendants, as Linux counts them."""
    family, ticks = {root}, 0
    processes = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    for process in sorted(processes):  # a child has a larger number than its parent
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended, and its parent counts it
            continue
        if process in family or int(fields[1]) in family:
            family.add(process)
            ticks += sum(map(int, fields[11:15]))  # its own, and those of children it waited for
    return ticks / os.sysconf("SC_CLK_TCK")


def report(contestant: str, package: str, ends: list[RoundEnd]) -> None:
    """Print the result from the times at which rounds ended.

    The first round includes the start of the simulator, so it is not timed.
    """
    examples = WORKLOAD.clients * WORKLOAD.examples * WORKLOAD.epochs
    result = {
        "contestant": contestant,
        "version": version(package),
        "seconds": ends[-1].clock - ends[0].clock,
        "processor_seconds": ends[-1].processor - ends[0].processor,
        "examples": (len(ends) - 1) * examples,
    }
    print(json.dumps(result))
