"""An event loop in virtual time: it jumps to its next timer, so that minutes pass in a moment."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from fedspd.node.peer import liveness, peer

Value = TypeVar("Value")


class InstantSelector(selectors.DefaultSelector):
    """A selector that advances a loop's time instead of waiting."""

    loop: "InstantLoop"

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        assert events or timeout is not None, "no timer is left that could end the wait"
        if not events and timeout:
            self.loop.now += timeout
        return events


class InstantLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time that does the work of threads itself, one after another."""

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

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(work(*values))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(run)  # other tasks go on meanwhile
        return future


@contextmanager
def virtual_time() -> Iterator[InstantLoop]:
    """Yield a loop whose time is that of all peers."""
    loop = InstantLoop()
    clock = SimpleNamespace(monotonic=loop.time, perf_counter=loop.time)
    with patch.object(liveness, "time", clock), patch.object(peer, "time", clock):
        try:
            yield loop
        finally:
            loop.close()


def run_instantly(work: Coroutine[Any, Any, Value]) -> Value:
    """Run peers in virtual time, so that no deadline depends on the machine."""
    with virtual_time() as loop:
        return loop.run_until_complete(work)


def pass_time(seconds: float) -> None:
    """Let the work of a thread take virtual time, or real time in another event loop."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # this is a thread
        time.sleep(seconds)
    else:
        assert isinstance(loop, InstantLoop)
        loop.now += seconds
