"""Memory of a large network: what `fedspd run --dry-run` predicts, and what the run takes.

    python benchmarks/memory.py                    10,000 clients, 1,976 parameters, degree 6, ten rounds, two workers
    python benchmarks/memory.py 3000 --hidden 240  fewer clients, 9,848 parameters

Memory is the sum over the processes of what each has to itself and its part of what they share (PSS), looked at 20 times a second.
"""

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import fedspd
from fedspd.config import ExperimentConfig, load
from fedspd.experiment.build import build_experiment
from fedspd.experiment.estimate import estimate

LOOK = 0.05  # seconds
EXAMPLES, FEATURES, CLASSES = 8, 32, 8


def data(clients: int) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(0)
    total = int(clients * EXAMPLES * 2) + 500
    x = generator.normal(size=(total, FEATURES)).astype(np.float32)
    y = (x @ generator.normal(size=(FEATURES, CLASSES))).argmax(1)
    cut = int(0.8 * total)
    return x[:cut], y[:cut], x[cut:], y[cut:]


def shared_out(process: int) -> int:
    """Bytes, or 0 for a process that has just ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    except (OSError, StopIteration):
        return 0


def whole() -> int:
    """Of this process and its children."""
    me = os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    return shared_out(me) + sum(shared_out(int(child)) for child in children)


class Highest(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(LOOK):
            self.bytes = max(self.bytes, whole())


def expected(
    config: ExperimentConfig, arrays: tuple[np.ndarray, ...], workers: int
) -> tuple[int, int]:
    """Parameters of a model, and bytes of the run; nothing of it is left when the run begins."""
    experiment = build_experiment(config, arrays)
    return experiment.plan.learner.size, estimate(experiment, workers)["memory"]["total"]


def main(
    clients: Annotated[int, typer.Argument()] = 10_000,
    hidden: Annotated[int, typer.Option(help="hidden units of the model")] = 48,
    rounds: Annotated[int, typer.Option()] = 10,
    workers: Annotated[int, typer.Option()] = 2,
) -> None:
    settings = [
        "data.mixture=permutation",
        "model.name=mlp",
        "training.batch=10",
        "training.epochs=1",
        "fedspd.final_epochs=1",
        "topology.degree=6",
    ]
    config = load(
        None,
        [
            f"clients={clients}",
            f"rounds={rounds}",
            f"data.examples={EXAMPLES}",
            f"model.hidden={hidden}",
            *settings,
        ],
    )
    arrays = data(clients)
    parameters, predicted = expected(config, arrays, workers)
    numbers = clients * config.clusters * parameters * 4
    highest, started = Highest(), time.perf_counter()
    highest.start()
    with tempfile.TemporaryDirectory() as folder:
        fedspd.run(config, data=arrays, workers=workers, out=Path(folder) / "run")
    seconds = time.perf_counter() - started
    highest.ended.set()
    highest.join()
    print(
        f"{clients:,} clients, {parameters:,} parameters, {rounds} rounds, {workers} workers: {seconds:.0f} s"
    )
    print(f"N x S x P numbers {numbers / 1e6:,.0f} MB; predicted {predicted / 1e6:,.0f} MB, measured {highest.bytes / 1e6:,.0f} MB "
          f"({100 * (predicted / highest.bytes - 1):+.1f} %)")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
