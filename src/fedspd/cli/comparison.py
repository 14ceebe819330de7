"""What compare, sweep and report do, and the table that one sees meanwhile."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

from fedspd.algorithms import METHODS
from fedspd.cli.progress import note_of
from fedspd.cli.running import new_folder
from fedspd.cli.tables import comparison_table
from fedspd.comparison.jobs import Job, jobs, parse_grid
from fedspd.comparison.scheduler import run_all
from fedspd.config import load, split_arguments
from fedspd.core.errors import ConfigError, WorkerError
from fedspd.experiment.callbacks import Callback
from fedspd.reporting import pages
from fedspd.reporting.method_rows import Comparison
from fedspd.storage.atomic import Json


def compare(
    settings: list[str],
    methods: str | None,
    seeds: int,
    out: Path | None,
    workers: int,
    as_json: bool,
) -> None:
    base = load(*split_arguments(settings))
    folder = out or new_folder(f"compare-{Path(base.data.name).stem}")
    _run(jobs(base, _names(methods), seeds), folder, workers, base.method, as_json)


def sweep(
    settings: list[str],
    methods: str | None,
    seeds: int,
    out: Path | None,
    workers: int,
    as_json: bool,
) -> None:
    path, words = split_arguments(settings)
    overrides, grid = parse_grid(words)
    if not grid:
        raise ConfigError(
            "There is nothing to sweep: give a key several values, as topology.degree=2,4,6, or use 'fedspd compare'."
        )
    base = load(path, overrides)
    folder = out or new_folder(f"sweep-{Path(base.data.name).stem}")
    _run(jobs(base, _names(methods), seeds, grid), folder, workers, base.method, as_json)


def report(runs: Sequence[Path], out: Path | None, as_json: bool) -> None:
    single = runs[0] if len(runs) == 1 and (runs[0] / "compare.json").exists() else None
    folder = out or single or Path("report")
    comparison = pages.write_report(runs, folder, load().method)
    _show(comparison, folder, as_json)


def _names(methods: str | None) -> list[str]:
    return (
        list(METHODS)
        if methods is None
        else [name.strip() for name in methods.split(",") if name.strip()]
    )


def _run(todo: list[Job], folder: Path, workers: int, reference: str, as_json: bool) -> None:
    with _repeatable(folder), ComparisonProgress(todo, as_json) as progress:
        run_all(todo, folder, workers, [progress], reference)
    _show(pages.write_report([folder], folder, reference), folder, as_json)


@contextmanager
def _repeatable(folder: Path) -> Iterator[None]:
    """Whatever ends the runs, what is done stays; the same command with the same folder continues them."""
    try:
        yield
    except (KeyboardInterrupt, WorkerError):
        if (folder / "compare.json").exists():
            words = ["fedspd", *sys.argv[1:]]
            place = (
                []
                if any(word == "--out" or word.startswith("--out=") for word in words)
                else ["--out", str(folder)]
            )
            print(f"\nfedspd: Continue with: {shlex.join([*words, *place])}", file=sys.stderr)
        raise


def _show(comparison: Comparison, folder: Path, as_json: bool) -> None:
    for note in comparison.notes:
        print(f"fedspd: {note}", file=sys.stderr)
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 1000  # a file has room
    console.print(
        comparison_table(comparison, lambda table: _width(console, table) <= console.width)
    )
    for alarm in comparison.alarms:
        console.print(alarm, style="yellow", markup=False)
    console.print(f"Report: {folder / 'report.html'}", markup=False, soft_wrap=True)
    if as_json:
        found = pages.to_json(comparison)
        rows = [
            {key: value for key, value in row.items() if key not in ("curve", "clients")}
            for row in found["rows"]
        ]
        print(
            json.dumps(
                {
                    "folder": str(folder),
                    "report": str(folder / "report.html"),
                    **found,
                    "rows": rows,
                }
            )
        )


def _width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(width=1000)).maximum


class ComparisonProgress(Callback):
    """A row per method and a bar for the whole on a terminal; elsewhere a line per finished run and tenth of the whole."""

    def __init__(self, todo: Sequence[Job], as_json: bool) -> None:
        self.todo = {job.name: job for job in todo}
        self.done = dict.fromkeys(
            (job.name for job in todo), 0
        )  # rounds, the final phase being one more
        self.total = sum(job.config.rounds + 1 for job in todo)
        self.finished: set[str] = set()
        self.latest: dict[str, tuple[int, str]] = {}  # method -> round, note
        columns = (
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        self.bar = Bar(*columns, console=console, speed_estimate_period=600)
        self.task: TaskID | None = None
        self.live = Live(console=console, get_renderable=self.shown, refresh_per_second=4)
        self.on_terminal = console.is_terminal and not as_json
        self.told = 0

    def __enter__(self) -> "ComparisonProgress":
        if self.on_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.on_terminal:
            self.live.stop()

    def on_start(self, event: Json) -> None:
        self.done[event["run"]] = event["round"]
        if event["round"] > event["rounds"]:
            self.finished.add(event["run"])
        elif self.task is None:  # only now: rounds done before say nothing about the speed
            self.task = self.bar.add_task("", total=self.total, completed=sum(self.done.values()))
        self._update()

    def on_round(self, event: Json) -> None:
        self._note(event)
        if not self.on_terminal and int(10 * self.share) > self.told:
            _print(f"{self.percent} done: {len(self.finished)} of {len(self.todo)} runs")
        self._update()

    def on_final(self, event: Json) -> None:
        self._note(event)
        self.finished.add(event["run"])
        if not self.on_terminal:
            _print(f"{event['run']}: {note_of(event)} ({self.percent} of the whole)")
        self._update()

    @property
    def share(self) -> float:
        return sum(self.done.values()) / self.total

    @property
    def percent(self) -> str:
        return f"{100 * self.share:.0f} %"

    def _note(self, event: Json) -> None:
        method = self.todo[event["run"]].config.method
        self.done[event["run"]] = event["round"]
        note = note_of(event) or self.latest.get(method, (0, ""))[1]
        self.latest[method] = (event["round"], note)

    def _update(self) -> None:
        self.told = int(10 * self.share)
        if self.task is not None:
            self.bar.update(self.task, completed=sum(self.done.values()))

    def shown(self) -> Group:
        table = Table("method", "runs", "round", "latest", title="Comparison", title_justify="left")
        for method in dict.fromkeys(job.config.method for job in self.todo.values()):
            own = [job for job in self.todo.values() if job.config.method == method]
            finished = sum(job.name in self.finished for job in own)
            round, note = self.latest.get(method, ("", ""))
            table.add_row(method, f"{finished} of {len(own)}", _round(round, own), note)
        return Group(table, self.bar)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _round(round: Any, own: Sequence[Job]) -> str:
    rounds = own[0].config.rounds
    return f"{min(round, rounds)} of {rounds}" if round else ""
