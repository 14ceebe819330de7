"""Show the progress of a run: live on a terminal, in a few lines elsewhere."""

import sys
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedspd.core.scores import R2, RMSE, main_score
from fedspd.experiment.callbacks import Callback
from fedspd.storage.atomic import Json


class ProgressCallback(Callback):
    """A callback with a display on standard error, which stops when a `with` block ends."""

    display: Progress | Live

    def __init__(self, as_json: bool) -> None:
        self.console = Console(stderr=True)
        self.is_live = self.console.is_terminal and not as_json

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.is_live:
            self.display.stop()


class RunProgress(ProgressCallback):
    """The progress of one run: a bar on a terminal, about ten lines elsewhere."""

    def __init__(self, as_json: bool = False) -> None:
        super().__init__(as_json)
        self.bar = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.display = self.bar
        self.task: TaskID | None = None
        self.rounds, self.method = 0, ""
        self.last_reported = -1  # tenth of the run
        self.alarms: set[str] = set()

    def on_start(self, event: Json) -> None:
        self.rounds, self.method = event["rounds"], event["method"]
        for sentence in event.get("privacy", ()) if self.task is None else ():
            print_line(sentence)
        if self.task is None:
            self.task = self.bar.add_task(self.method, total=self.rounds, score="")
        self._update(event)
        if self.is_live:
            self.bar.start()

    def on_round(self, event: Json) -> None:
        self._update(event)
        if not self.is_live:
            self._report(event, f"round {event['round']} of {self.rounds}")

    def on_final(self, event: Json) -> None:
        self._update(event)
        if not self.is_live:
            self._report(event, "at the end")

    def on_alarm(self, round: int, alarm: str) -> None:
        """Print each kind of alarm once, when it is first raised."""
        kind = alarm.split(" at ")[0]
        if kind not in self.alarms:
            self.alarms.add(kind)
            line = f"round {round}: {alarm}"
            self.console.print(line, style="yellow", markup=False, highlight=False)

    def _update(self, event: Json) -> None:
        assert self.task is not None
        completed = min(event["round"], self.rounds)
        self.bar.update(self.task, completed=completed, score=describe_score(event))

    def _report(self, event: Json, moment: str) -> None:
        """Print the score of an evaluated round, at most once in each tenth of the run."""
        tenth = 10 * event["round"] // (self.rounds + 1)
        if tenth > self.last_reported and "accuracy" in event:
            self.last_reported = tenth
            print_line(f"{self.method}, {moment}: {describe_score(event)}")


def describe_score(event: Json) -> str:
    """Return the mean accuracy over clients, or the RMSE and R2 of a regression, else nothing."""
    main = main_score(event)
    shown = [main, R2] if main == RMSE else [main]
    texts = []
    for score in shown:
        known = [value for value in event.get(score.name, []) if value is not None]
        if known:
            texts.append(f"{score.title} {score.text(sum(known) / len(known))}{score.unit}")
    return ", ".join(texts)


def print_line(line: str) -> None:
    """Print to standard error at once."""
    print(line, file=sys.stderr, flush=True)
