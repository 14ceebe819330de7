"""Many runs of one experiment: methods, seeds and a grid of values, side by side, resumable as a whole.

OUT/
  compare.json             what is compared
  NAME/                    one run folder per method, seed and grid point
  report.*, figures/       what fedspd.report makes of them
"""

import itertools
import multiprocessing
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from fedspd import experiment
from fedspd.build import build, device_of
from fedspd.config import METHOD_TABLES, Base, as_dict, config_hash, parse_override, set_key, validate
from fedspd.core.errors import ConfigError, FedspdError, RecordError, WorkerError
from fedspd.core.named import options_table
from fedspd.engines.processes import STOPPING, end_with_parent, signals_held_back
from fedspd.record import Json, Record, disk

OPTIONS_TABLES = {*METHOD_TABLES, "options"}


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    name: str
    config: Base
    point: Json  # the values of the swept keys


Listener = Callable[[Job, Json], None]
Running = dict[Connection, tuple[Job, BaseProcess]]


def jobs(base: Base, methods: Sequence[str], seeds: int, grid: dict[str, list[Any]] | None = None) -> list[Job]:
    """Every method with every seed at every point of the grid; one seed gives one split and one graph to all methods."""
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: expected at least 1.")
    if not methods:
        raise ConfigError("--methods: expected at least one method.")
    if len(set(methods)) < len(methods):
        raise ConfigError(f"--methods {','.join(methods)}: a method is named twice.")
    grid = grid or {}
    _check_grid(grid, methods)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    found: dict[str, Job] = {}
    for point, seed, method in itertools.product(points, range(seeds), methods):
        job = _job(base, method, base.seed + seed, point)
        if found.setdefault(job.name, job).config != job.config:
            raise ConfigError(f"Two runs would have the folder '{job.name}': rename a value.")
    return list(found.values())


def _check_grid(grid: dict[str, list[Any]], methods: Sequence[str]) -> None:
    for key, values in grid.items():
        table = key.partition(".")[0]
        if table in OPTIONS_TABLES and table not in map(options_table, methods):
            whose = "a method of your own, as module:Class" if table == "options" else table
            raise ConfigError(f"{key} cannot be swept without {whose}: add it to --methods.")
        if key in ("method", "seed"):
            raise ConfigError(f"'{key}' cannot be swept: give --{key}s instead.")
        if len({repr(value) for value in values}) < len(values):
            raise ConfigError(f"{key}={','.join(map(str, values))}: a value is given twice.")


def _job(base: Base, method: str, seed: int, point: Json) -> Job:
    others = OPTIONS_TABLES - {options_table(method)}
    point = {key: value for key, value in point.items() if key.partition(".")[0] not in others}
    tree = as_dict(base)
    for key, value in point.items():
        set_key(tree, key, value)
    config = validate({**tree, "method": method, "seed": seed})
    place = "".join(f"{key}={value}," for key, value in point.items())
    return Job(f"{place}{method.replace(':', '.')},seed={seed}".replace("/", "_"), config, point)


def parse_grid(words: Sequence[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Of the words of a command line, those with one value, and those with several: a=1 b=2,4,6."""
    single: list[str] = []
    grid: dict[str, list[Any]] = {}
    for word in words:
        key, value = parse_override(word)
        quoted = word.partition("=")[2].lstrip().startswith(("'", '"'))
        if isinstance(value, str) and "," in value and not quoted:
            _, values = parse_override(f"{key}=[{value}]")  # as TOML: a list may be among them; else there are bare words
            grid[key] = values if isinstance(values, list) else [parse_override(f"{key}={part}")[1] for part in value.split(",")]
        else:
            single.append(word)
    return single, grid


def run_all(todo: Sequence[Job], folder: Path, workers: int, listener: Listener) -> list[Path]:
    """Run what is not finished yet, several at a time; returns every run folder."""
    _claim(todo, folder)
    finished = {job.name for job in todo if (folder / job.name / "result.json").exists()}
    for job in todo:
        if job.name in finished:
            listener(job, _finished(job))
    waiting = [job for job in todo if job.name not in finished]
    on_cpu = all(device_of(job.config).type == "cpu" for job in waiting)
    at_once = max(1, min(workers, len(waiting))) if on_cpu else 1  # a fork cannot use a GPU that its parent has used
    if at_once == 1:
        _run_in_turn(waiting, folder, workers, listener)
    else:
        _run_in_parallel(waiting, folder, at_once, workers // at_once, listener)
    return [folder / job.name for job in todo]


def _finished(job: Job) -> Json:
    return {"event": "finished", "round": job.config.rounds + 1}


def _claim(todo: Sequence[Job], folder: Path) -> None:
    """A folder belongs to one comparison; the same one may be continued in it."""
    content = {"runs": {job.name: config_hash(job.config) for job in todo}, "points": {job.name: job.point for job in todo}}
    if (folder / "compare.json").exists():
        if Record(folder).read("compare.json") != content:
            raise RecordError(f"'{folder}' holds another comparison: give another folder with --out, or repeat that one as it was.")
        return
    if folder.exists() and not (folder.is_dir() and _vacant(folder)):
        raise RecordError(f"The folder '{folder}' exists and is no comparison: give another one with --out.")
    for job in {(repr(job.point), job.config.seed): job for job in todo}.values():
        with _named(job):
            build(job.config)  # what can be refused is refused before there is a folder
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    Record(folder).write("compare.json", content)


def _vacant(folder: Path) -> bool:
    """Empty, but for what a start that was cut short has left."""
    return all(path.name.startswith(".compare.json.draft-") for path in folder.iterdir())


@contextmanager
def _named(job: Job) -> Iterator[None]:
    """An error says in which run it came up."""
    try:
        yield
    except FedspdError as error:
        raise type(error)(f"In the run '{job.name}': {error}") from None


def _run(job: Job, folder: Path, workers: int, listener: experiment.Listener) -> None:
    started = (folder / "run.json").exists()
    experiment.run(job.config, out=folder, resume=started, workers=workers, listener=listener)


def _run_in_turn(waiting: Sequence[Job], folder: Path, workers: int, listener: Listener) -> None:
    for job in waiting:
        with _named(job):
            _run(job, folder / job.name, workers, partial(listener, job))
        listener(job, _finished(job))


def _run_in_parallel(waiting: Sequence[Job], folder: Path, at_once: int, workers: int, listener: Listener) -> None:
    queue = deque(waiting)
    running: Running = {}
    try:
        while queue or running:
            while queue and len(running) < at_once:
                _start(queue.popleft(), folder, workers, running)
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                _take(pipe, running, listener)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def _start(job: Job, folder: Path, workers: int, running: Running) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(job, folder / job.name, workers, there))
    with signals_held_back():
        process.start()
    there.close()
    running[here] = (job, process)


def _take(pipe: Connection, running: Running, listener: Listener) -> None:
    job, process = running[pipe]
    try:
        message = pipe.recv()
    except EOFError:
        process.join()
        del running[pipe]
        if process.exitcode:
            raise WorkerError(
                f"The run '{job.name}' ended with exit code {process.exitcode} (negative: killed by that signal; -9 is often a lack of "
                "memory: try fewer --workers)."
            ) from None
        return
    if isinstance(message, Exception):
        raise message
    listener(job, message)


def _child(job: Job, folder: Path, workers: int, pipe: Connection) -> None:
    """A run in a process of its own, which ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # a fork cannot use the threads that its parent had
    try:
        with _named(job):
            _run(job, folder, workers, lambda event: pipe.send(brief(event)))
        pipe.send(_finished(job))
    except FedspdError as error:
        pipe.send(error)
    except Exception:
        pipe.send(WorkerError(f"The run '{job.name}' failed:\n{traceback.format_exc()}"))


def brief(event: Json) -> Json:
    """What a live table needs of an event."""
    return {key: event[key] for key in ("event", "round", "rounds", "method", "accuracy", "test_loss", "bytes") if key in event}
