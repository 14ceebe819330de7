"""How long a run takes to begin, in a fresh process."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from statistics import median

from torch import Tensor

from fedspd.bench.rows import BenchRow, Size
from fedspd.models import MLP

SAID = b"now\n"
PROGRAM = "from fedspd.cli.main import main; main()"


class Caller(MLP):
    """Says when it is first trained: a run is given it as its model."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            os.write(sys.stdout.fileno(), SAID)
        output: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return output


def rows(size: Size) -> Iterator[BenchRow]:
    turns = [
        (_first_step(), _import_torch()) for _ in range(size.turns)
    ]  # warm: this process has read the same files
    step, torch = (median(seconds) for seconds in zip(*turns, strict=True))
    what = "start-up: seconds to the first training step of a run over those of `import torch`"
    yield BenchRow.of(
        "start", what, [s / t for s, t in turns], 3.0, False, first_step=step, import_torch=torch
    )


def _import_torch() -> float:
    return _until_said("-c", f"import torch, sys, os; os.write(1, {SAID!r})")


def _first_step() -> float:
    with tempfile.TemporaryDirectory(prefix="fedspd-") as folder:
        return _until_said(
            "-c",
            PROGRAM,
            "run",
            f"model.name={__name__}:{Caller.__name__}",
            "--out",
            f"{folder}/run",
            "--json",
        )


def _until_said(*arguments: str) -> float:
    """Seconds until the program says so; it is then stopped."""
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
        process.kill()
        assert line == SAID, line
    return seconds
