"""Show the progress of a comparison: live on a terminal, in a few lines elsewhere."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedspd.comparison.jobs import Job
from fedspd.config import ExperimentConfig
from fedspd.experiment.progress import ProgressCallback, describe_score, print_line
from fedspd.storage.atomic import Json

SPEED_WINDOW_SECONDS = 600  # runs of a comparison differ in speed


class ComparisonProgress(ProgressCallback):
    """The progress of a comparison.

    On a terminal, it is a row per method and a bar. Elsewhere, it is a line for each finished run
    and for each tenth of the comparison.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        as_json: bool,
        seconds_of: Callable[[ExperimentConfig], float] | None = None,
    ) -> None:
        """Weigh runs by `seconds_of` their configs, if it is given; else all rounds count alike."""
        super().__init__(as_json)
        self.jobs = {job.name: job for job in jobs}
        self.completed = dict.fromkeys(self.jobs, 0)  # rounds; the final phase is one more
        self.cost = {  # of one round of each run
            job.name: seconds_of(job.config) / (job.config.rounds + 1) if seconds_of else 1.0
            for job in jobs
        }
        self.total = sum(self.cost[job.name] * (job.config.rounds + 1) for job in jobs)
        self.finished: set[str] = set()
        self.latest: dict[str, tuple[int, str]] = {}  # method -> round, score
        self.last_reported = 0  # tenth of the comparison
        self.bar = Progress(
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            speed_estimate_period=SPEED_WINDOW_SECONDS,
        )
        self.task: TaskID | None = None
        self.display = Live(console=self.console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self.is_live:
            self.display.start()
        return super().__enter__()

    def on_start(self, event: Json) -> None:
        self.completed[event["run"]] = event["round"]
        if event["round"] > event["rounds"]:
            self.finished.add(event["run"])
        elif self.task is None:  # only now: rounds of an earlier start do not show the speed
            self.task = self.bar.add_task("", total=self.total, completed=int(self.done))
        self._update()

    def on_round(self, event: Json) -> None:
        self._record(event)
        is_next_tenth = int(10 * self.fraction) > self.last_reported
        self._update()
        if is_next_tenth and not self.is_live:
            runs = f"{len(self.finished)} of {len(self.jobs)} runs"
            print_line(f"{self.percent} done: {runs}{self._time_left()}")

    def on_final(self, event: Json) -> None:
        self._record(event)
        self.finished.add(event["run"])
        if not self.is_live:
            print_line(f"{event['run']}: {describe_score(event)} ({self.percent} of all rounds)")
        self._update()

    @property
    def done(self) -> float:
        """The part of the total that is done."""
        return sum(self.cost[name] * rounds for name, rounds in self.completed.items())

    @property
    def fraction(self) -> float:
        return self.done / self.total

    @property
    def percent(self) -> str:
        return f"{100 * self.fraction:.0f} %"

    def _record(self, event: Json) -> None:
        method = self.jobs[event["run"]].config.method
        self.completed[event["run"]] = event["round"]
        score = describe_score(event) or self.latest.get(method, (0, ""))[1]
        self.latest[method] = (event["round"], score)

    def _update(self) -> None:
        self.last_reported = int(10 * self.fraction)
        if self.task is not None:
            self.bar.update(self.task, completed=self.done)

    def _time_left(self) -> str:
        """Return the estimate of the bar, once it knows the speed."""
        seconds = None if self.task is None else self.bar.tasks[self.task].time_remaining
        return "" if seconds is None else f", {timedelta(seconds=seconds)} left"

    def render(self) -> Group:
        """Return the live table and the bar."""
        table = Table("method", "runs", "round", "latest", title="Comparison", title_justify="left")
        for method in dict.fromkeys(job.config.method for job in self.jobs.values()):
            jobs = [job for job in self.jobs.values() if job.config.method == method]
            finished = sum(job.name in self.finished for job in jobs)
            rounds = jobs[0].config.rounds
            round, score = self.latest.get(method, (0, ""))
            position = f"{min(round, rounds)} of {rounds}" if round else ""
            table.add_row(method, f"{finished} of {len(jobs)}", position, score)
        return Group(table, self.bar)
