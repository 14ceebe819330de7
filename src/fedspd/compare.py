"""Many runs of one experiment: methods, seeds and a grid of values, side by side, resumable as a whole.

OUT/
  compare.json             what is compared
  NAME/                    one run folder per method, seed and grid point
"""

import itertools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fedspd import experiment
from fedspd.config import Base, as_dict, config_hash, parse_override, set_key, validate
from fedspd.core.errors import ConfigError, FedspdError, RecordError, WorkerError
from fedspd.record import Json, Record

Listener = Callable[["Job", Json], None]


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    name: str
    config: Base
    point: Json  # the values of the swept keys

    @property
    def label(self) -> str:
        return self.config.method


def jobs(base: Base, methods: Sequence[str], seeds: int, grid: dict[str, list[Any]] | None = None) -> list[Job]:
    """Every method with every seed at every point of the grid; one seed gives one split and one graph to all methods."""
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: expected at least 1.")
    if not methods:
        raise ConfigError("--methods: expected at least one method.")
    if len(set(methods)) < len(methods):
        raise ConfigError(f"--methods {','.join(methods)}: a method is named twice.")
    grid = grid or {}
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [
        job(base, method, base.seed + seed, point)
        for point in points for seed in range(seeds) for method in methods
    ]  # fmt: skip


def job(base: Base, method: str, seed: int, point: Json) -> Job:
    tree = as_dict(base)
    for key, value in point.items():
        set_key(tree, key, value)
    config = validate({**tree, "method": method, "seed": seed})
    place = "".join(f"{key}={value}," for key, value in point.items())
    return Job(f"{place}{method.replace(':', '.')},seed={seed}".replace("/", "_"), config, point)


def parse_grid(words: Sequence[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Of the words of a command line, those with one value, and those with several: a=1 b=2,4,6."""
    single, grid = [], {}
    for word in words:
        key, _, values = word.partition("=")
        if "," in values and not values.lstrip().startswith("["):
            grid[key.strip()] = [parse_override(f"{key}={value}")[1] for value in values.split(",")]
        else:
            single.append(word)
    return single, grid


def run_all(todo: Sequence[Job], folder: Path, workers: int, listener: Listener) -> list[Path]:
    """Run what is not finished yet, several at a time; returns every run folder."""
    _claim(todo, folder)
    waiting = [job for job in todo if not (folder / job.name / "result.json").exists()]
    for job in todo:
        if job not in waiting:
            listener(job, {"event": "finished", "round": job.config.rounds + 1})
    at_once = max(1, min(workers, len(waiting)))
    if at_once == 1:
        for job in waiting:
            _run(job, folder / job.name, workers, lambda event, job=job: listener(job, event))  # type: ignore[misc]
            listener(job, {"event": "finished", "round": job.config.rounds + 1})
    else:
        _run_in_parallel(waiting, folder, at_once, listener)
    return [folder / job.name for job in todo]


def _claim(todo: Sequence[Job], folder: Path) -> None:
    """A folder belongs to one comparison; the same one may be continued in it."""
    content = {"runs": {job.name: config_hash(job.config) for job in todo}, "points": {job.name: job.point for job in todo}}
    path = folder / "compare.json"
    if path.exists():
        if Record(folder).read("compare.json") != content:
            raise RecordError(f"'{folder}' holds another comparison: give another folder with --out, or repeat that one as it was.")
        return
    if folder.exists() and any(folder.iterdir()):
        raise RecordError(f"The folder '{folder}' exists and is no comparison: give another one with --out.")
    folder.mkdir(parents=True, exist_ok=True)
    Record(folder).write("compare.json", content)


def _run(job: Job, folder: Path, workers: int, listener: experiment.Listener) -> None:
    started = (folder / "run.json").exists()
    experiment.run(None if started else job.config, out=folder, resume=started, workers=workers, listener=listener)


def _run_in_parallel(waiting: Sequence[Job], folder: Path, at_once: int, listener: Listener) -> None:
    context = multiprocessing.get_context("fork")
    queue = list(waiting)
    running: dict[Connection, tuple[Job, Any]] = {}
    try:
        while queue or running:
            while queue and len(running) < at_once:
                job = queue.pop(0)
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(job, folder / job.name, there))
                process.start()
                there.close()
                running[here] = (job, process)
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                _take(pipe, running, listener)
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def _take(pipe: Connection, running: dict[Connection, tuple[Job, Any]], listener: Listener) -> None:
    job, process = running[pipe]
    try:
        message = pipe.recv()
    except EOFError:
        process.join()
        del running[pipe]
        if process.exitcode:
            raise WorkerError(f"The run '{job.name}' ended with exit code {process.exitcode}; repeat the command to continue.") from None
        return
    if isinstance(message, Exception):
        raise message
    listener(job, message)


def _child(job: Job, folder: Path, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _run(job, folder, 1, lambda event: pipe.send(brief(event)))
        pipe.send({"event": "finished", "round": job.config.rounds + 1})
    except FedspdError as error:
        pipe.send(type(error)(f"In the run '{job.name}': {error}"))
    except BrokenPipeError:
        os._exit(1)  # the parent is gone
    except Exception:
        pipe.send(WorkerError(f"The run '{job.name}' failed:\n{traceback.format_exc()}"))


def brief(event: Json) -> Json:
    """What a live table needs of an event."""
    return {key: event[key] for key in ("event", "round", "rounds", "method", "accuracy", "test_loss", "bytes") if key in event}
