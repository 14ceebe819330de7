"""An event loop in virtual time: it jumps to its next timer, so that minutes pass in a moment."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from fedspd.node.peer import liveness

Value = TypeVar("Value")


class InstantSelector(selectors.DefaultSelector):
    """A selector that advances a loop's time instead of waiting."""

    loop: "InstantLoop"

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout:
            self.loop.now += timeout
        return events


class InstantLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time that runs the work of threads at once."""

    def __init__(self) -> None:
        self.now, selector = 0.0, InstantSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, work: Callable[..., Any], *values: Any
    ) -> "asyncio.Future[Any]":
        future = self.create_future()
        try:
            future.set_result(work(*values))
        except Exception as error:
            future.set_exception(error)
        return future


def run_instantly(work: Coroutine[Any, Any, Value]) -> Value:
    """Run peers in virtual time, so that no deadline depends on the machine."""
    loop = InstantLoop()
    with patch.object(liveness, "time", SimpleNamespace(monotonic=loop.time)):
        try:
            return loop.run_until_complete(work)
        finally:
            loop.close()


def pass_time(seconds: float) -> None:
    """Let the work of a thread take virtual time, or real time in another event loop."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # this is a thread
        time.sleep(seconds)
    else:
        assert isinstance(loop, InstantLoop)
        loop.now += seconds
