"""Benchmark of the start of a run, in a new process."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from statistics import median

from torch import nn

from fedspd.bench.results import BenchmarkResult, BenchmarkSize
from fedspd.models import MLP

SIGNAL = b"now\n"
PROGRAM = "from fedspd.cli.main import main; main()"


def signalling_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model that prints a signal when it is trained."""

    def signal(module: nn.Module, inputs: object) -> None:
        if module.training:
            os.write(sys.stdout.fileno(), SIGNAL)

    model = MLP(shape, classes)
    model.register_forward_pre_hook(signal)
    return model


def measure_startup(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare the time to a run's first training step with that of importing torch.

    The files are in the cache of the system, as this process has read them.
    """
    turns = [(_first_step(), _import_torch()) for _ in range(size.turns)]
    step, torch = (median(seconds) for seconds in zip(*turns, strict=True))
    yield BenchmarkResult.from_turns(
        "start",
        "start-up: seconds to the first training step of a run over those of `import torch`",
        [step / torch for step, torch in turns],
        3.0,
        at_least=False,
        first_step=step,
        import_torch=torch,
    )


def _import_torch() -> float:
    return _seconds_to_signal("-c", f"import torch, sys, os; os.write(1, {SIGNAL!r})")


def _first_step() -> float:
    model = f"model.name={__name__}:{signalling_mlp.__name__}"
    with tempfile.TemporaryDirectory(prefix="fedspd-") as folder:
        return _seconds_to_signal("-c", PROGRAM, "run", model, "--out", f"{folder}/run", "--json")


def _seconds_to_signal(*arguments: str) -> float:
    """Return the seconds until a new Python process prints the signal, and stop it."""
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
        process.kill()
        assert line == SIGNAL, line
    return seconds
