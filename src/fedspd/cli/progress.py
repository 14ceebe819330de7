"""A bar with an estimate on a terminal, a few plain lines elsewhere."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from fedspd.experiment.callbacks import Callback
from fedspd.storage.atomic import Json


class RunProgress(Callback):
    """The progress of one run: a bar on a terminal, a line per tenth elsewhere."""

    def __init__(self, as_json: bool = False) -> None:
        self.console = Console(stderr=True)
        columns = (
            TextColumn("{task.description:>10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.bar = Bar(
            *columns,
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.live = self.console.is_terminal and not as_json
        self.rounds, self.method, self.told = 0, "", -1
        self.task: TaskID | None = None
        self.alarms: set[str] = set()

    def __enter__(self) -> "RunProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live:
            self.bar.stop()

    def on_start(self, event: Json) -> None:
        self.rounds, self.method = event["rounds"], event["method"]
        if self.task is None:
            self.task = self.bar.add_task(self.method, total=self.rounds, note="")
        self._update(event)
        if self.live:
            self.bar.start()

    def on_round(self, event: Json) -> None:
        self._update(event)
        if not self.live:
            self._line(event)

    def on_final(self, event: Json) -> None:
        self.on_round(event)

    def on_alarm(self, round: int, alarm: str) -> None:
        """Print each kind of alarm once, when it is first raised."""
        kind = alarm.split(" at ")[0]
        if kind not in self.alarms:
            self.alarms.add(kind)
            self.console.print(
                f"round {round}: {alarm}", style="yellow", markup=False, highlight=False
            )

    def _update(self, event: Json) -> None:
        assert self.task is not None
        self.bar.update(self.task, completed=min(event["round"], self.rounds), note=note_of(event))

    def _line(self, event: Json) -> None:
        """About ten lines for a run, however long."""
        tenth = 10 * event["round"] // (self.rounds + 1)
        if tenth > self.told and "accuracy" in event:
            self.told = tenth
            place = (
                "at the end"
                if event["event"] == "final"
                else f"round {event['round']} of {self.rounds}"
            )
            print(f"{self.method}, {place}: {note_of(event)}", file=sys.stderr, flush=True)


def note_of(event: Json) -> str:
    scores = [score for score in event.get("accuracy", []) if score is not None]
    if scores:
        return f"accuracy {100 * sum(scores) / len(scores):.1f} %"
    losses = [loss for loss in event.get("test_loss", []) if loss is not None]
    return f"test loss {sum(losses) / len(losses):.4g}" if losses else ""
