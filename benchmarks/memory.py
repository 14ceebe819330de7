"""Memory of a large network: the prediction of `fedspd run --dry-run`, and the peak of the run.

    python benchmarks/memory.py                     10,000 clients, 1,976 parameters, degree 6,
                                                    ten rounds, two workers
    python benchmarks/memory.py 3000 --hidden 240   fewer clients, 9,848 parameters
    python benchmarks/memory.py 100000              many clients

Memory is summed over the processes and sampled 20 times a second. Pages that several processes
share are counted once, by their proportional set size (PSS). Libraries are those of the largest
process: their PSS would be smaller while other programs use them too.
"""

import os
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

import fedspd
from fedspd.config import ExperimentConfig, load
from fedspd.experiment.build import build_experiment
from fedspd.experiment.estimate import estimate

SAMPLE_SECONDS = 0.05
EXAMPLES, FEATURES, CLASSES = 8, 32, 8


def data(clients: int) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(0)
    total = int(clients * EXAMPLES * 2) + 500
    x = generator.normal(size=(total, FEATURES)).astype(np.float32)
    y = (x @ generator.normal(size=(FEATURES, CLASSES))).argmax(1)
    cut = int(0.8 * total)
    return x[:cut], y[:cut], x[cut:], y[cut:]


def sizes(process: int, file: str, names: tuple[str, ...]) -> int:
    """Return the sum of some sizes of a process, or 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{process}/{file}").read_text().splitlines()
    except OSError:
        return 0
    found = (line.split() for line in lines if line.split(":")[0] in names)
    return 1024 * sum(int(fields[1]) for fields in found)


def processes() -> list[int]:
    """Return this process and its children."""
    me = os.getpid()
    return [me, *map(int, Path(f"/proc/{me}/task/{me}/children").read_text().split())]


def total_bytes() -> int:
    """Return the memory of all processes, with the files that the largest one has mapped."""
    found = processes()
    own = sum(sizes(process, "smaps_rollup", ("Pss_Anon", "Pss_Shmem")) for process in found)
    return own + max(sizes(process, "status", ("RssFile",)) for process in found)


def processor_seconds() -> float:
    """Return the time that all processes have had on a core."""
    fields = [Path(f"/proc/{process}/stat").read_text().rsplit(")")[1] for process in processes()]
    ticks = sum(int(tick) for line in fields for tick in line.split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


class RoundClock(fedspd.Callback):
    """The callback that notes the processor time at the end of each round."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_round(self, event: dict[str, Any]) -> None:
        self.ends.append(processor_seconds())
        print(f"round {event['round']}: {total_bytes() / 1e6:,.0f} MB", file=sys.stderr, flush=True)


class PeakSampler(threading.Thread):
    """A thread that samples the memory and keeps the peak."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, total_bytes())


def predict(
    config: ExperimentConfig, arrays: tuple[np.ndarray, ...], workers: int
) -> tuple[int, int]:
    """Return the parameters of all centers and the bytes of the run, and free all memory again."""
    experiment = build_experiment(config, arrays)
    clusters = experiment.plan.algorithm.clusters
    return clusters * experiment.plan.learner.size, estimate(experiment, workers)["memory"]["total"]


def main(
    clients: Annotated[int, typer.Argument()] = 10_000,
    hidden: Annotated[int, typer.Option(help="hidden units of the model")] = 48,
    rounds: Annotated[int, typer.Option()] = 10,
    workers: Annotated[int, typer.Option()] = 2,
) -> None:
    settings = [
        f"clients={clients}",
        f"rounds={rounds}",
        f"data.examples={EXAMPLES}",
        "data.mixture=permutation",
        "model.name=mlp",
        f"model.hidden={hidden}",
        "training.batch=10",
        "training.epochs=1",
        "method=fedspd",
        "fedspd.final_epochs=1",
        "topology.degree=6",
    ]
    config = load(overrides=settings)
    arrays = data(clients)
    parameters, predicted = predict(config, arrays, workers)
    sampler, clock, started = PeakSampler(), RoundClock(), time.perf_counter()
    sampler.start()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        fedspd.run(config, data=arrays, workers=workers, out=out, callbacks=[clock])
    seconds = time.perf_counter() - started
    sampler.ended.set()
    sampler.join()
    centers = clients * parameters * 4
    error = 100 * (predicted / sampler.peak - 1)
    print(f"{clients:,} clients, {parameters:,} parameters each (of all centers)")
    print(f"{rounds} rounds, {workers} workers")
    rounds_ms = [1000 * (end - start) / clients for start, end in pairwise(clock.ends[:-1])]
    print(f"time:        {seconds:,.0f} s")
    print(f"round:       {median(rounds_ms):.3f} processor milliseconds per client")
    print(f"N x S x P:   {centers / 1e6:,.0f} MB")
    print(f"predicted:   {predicted / 1e6:,.0f} MB ({error:+.1f} %)")
    print(f"measured:    {sampler.peak / 1e6:,.0f} MB")


if __name__ == "__main__":
    typer.run(main)
