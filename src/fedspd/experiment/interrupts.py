"""Ctrl-C and SIGTERM: let the round in progress end, so that nothing is lost.

Python loses an exception that a handler raises in a hook of a fork, a finaliser or the garbage
collector: it only prints it. A library may lose one while it is imported. A signal is therefore
remembered too, and the run asks for it.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

GRACE_SECONDS = 1.0  # that a round gets to end after a signal
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Whether the run was asked to stop; the round in progress then has a moment to end.

    It stops at once if no round would be lost, when the moment is over, or at a second signal.
    """

    def __init__(self) -> None:
        self.has_unsaved_rounds = False
        self.is_requested = False
        self._main = threading.get_ident()

    def check(self) -> None:
        """Stop if the run was asked to."""
        if self.is_requested:
            raise KeyboardInterrupt

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        is_first, self.is_requested = not self.is_requested, True
        if not (is_first and self.has_unsaved_rounds):
            raise KeyboardInterrupt
        timer = threading.Timer(GRACE_SECONDS, self._repeat, [number])
        timer.daemon = True
        timer.start()

    def _repeat(self, number: int) -> None:
        if signal.getsignal(number) != self.handle:  # the run has ended
            return
        if hasattr(signal, "pthread_kill"):  # wakes the main thread where it waits for a worker
            with suppress(ProcessLookupError):
                signal.pthread_kill(self._main, number)
        else:
            signal.raise_signal(number)


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Handle signals that would raise KeyboardInterrupt in this thread, until the block ends.

    A block that has lost the exception raises it at its end. A block inside another one shares what
    that one knows, and raises an exception that was lost there at its beginning.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS if is_main}
    outer = [getattr(handler, "__self__", None) for handler in handlers.values()]
    found = next((one for one in outer if isinstance(one, Interrupts)), None) or Interrupts()
    found.check()
    taken = [n for n, handler in handlers.items() if handler == signal.default_int_handler]
    for number in taken:
        signal.signal(number, found.handle)
    try:
        yield found
        found.check()
    finally:
        for number in taken:
            signal.signal(number, signal.default_int_handler)
