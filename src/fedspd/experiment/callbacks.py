"""Callbacks: objects that follow a run while it trains.

Pass them to `fedspd.run(..., callbacks=[...])`. The records, the trackers and the progress bar of
the command line are callbacks too.
"""

from collections.abc import Sequence
from typing import Any

from fedspd.core.errors import ConfigError
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder


class StopRun(Exception):
    """Raised by a callback in `on_round`: the run ends after this round, with its final phase.

    Its text is recorded as the reason.
    """


class Callback:
    """Base class of callbacks: override the methods that you need; the others do nothing.

    Methods are called in the process that called `fedspd.run`, in the order of the list. The event
    is a dictionary, as in events.jsonl; do not change it. `StopRun` in `on_round` ends the run with
    its final phase and its Result. Any other exception ends it at once; it can be resumed from its
    last checkpoint.
    """

    def on_start(self, event: Json) -> None:
        """Called when a run starts, resumes, or goes back to its last checkpoint after a failure.

        `event` has `round`, the number of rounds that are done (`rounds` + 1 with the final phase),
        `rounds`, `method` and `config`.
        """

    def on_round(self, event: Json) -> None:
        """Called after each round, once its event is recorded.

        `event` has `round`, `steps`, `lr`, `traffic`, `bytes` and `seconds`; in rounds with an
        evaluation also `accuracy`, `test_loss` and `alarms`, and other metrics of the method.
        """

    def on_final(self, event: Json) -> None:
        """Called once the final phase is recorded, with an event as in a round with an evaluation.

        With held-out clients, `event` has their scores as `newcomers`.
        """

    def on_alarm(self, round: int, alarm: str) -> None:
        """Called for each alarm of an event, before the method for the event itself.

        `alarm` is a sentence, for example about a loss that is not finite or a lost worker.
        """


def check_callbacks(callbacks: Any) -> None:
    """Refuse objects that are not callbacks before anything starts."""
    given = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    wrong = [callback for callback in given if not isinstance(callback, Callback)]
    if given is not callbacks or wrong:
        found = type(callbacks if given is not callbacks else wrong[0]).__name__
        hint = " Pass an object of the class: MyCallback()." if found == "type" else ""
        raise ConfigError(
            f"callbacks: a value of type {found}; expected a list of objects derived from "
            f"fedspd.Callback.{hint}"
        )


def notify(callbacks: Sequence[Callback], event: Json) -> str | None:
    """Pass the event and its alarms to every callback; return why one of them stops the run."""
    reason = None
    for callback in callbacks:
        for alarm in event.get("alarms", ()):
            callback.on_alarm(event["round"], alarm)
        handlers = {
            "start": callback.on_start,
            "round": callback.on_round,
            "final": callback.on_final,
        }
        try:
            handlers[event["event"]](event)
        except StopRun as stop:
            name = type(callback).__name__
            if event["event"] != "round":
                raise ConfigError(
                    f"callbacks: {name} raised StopRun outside on_round; expected it there. Raise "
                    "another exception to end a run without a result."
                ) from None
            reason = f"after round {event['round']}: {str(stop) or f'by the callback {name}'}"
    return reason


class Recorder(Callback):
    """The callback that writes events.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_round(self, event: Json) -> None:
        self.folder.append(event)

    def on_final(self, event: Json) -> None:
        self.folder.append(event)
