"""Ctrl-C and SIGTERM during a run: finish the round for a moment, so that nothing is lost."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

GRACE_SECONDS = 1.0  # that a round gets to end after a signal
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Whether the run was asked to stop; the round in progress then has a moment to end.

    Without rounds to lose, after the moment, or at the second signal, it stops at once.
    """

    def __init__(self) -> None:
        self.has_unsaved_rounds = False
        self._is_requested = False
        self._main = threading.get_ident()

    def check(self) -> bool:
        """Return whether to save the rounds and stop."""
        return self._is_requested

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._is_requested or not self.has_unsaved_rounds:
            raise KeyboardInterrupt
        self._is_requested = True
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
    """Handle signals that would raise KeyboardInterrupt in this thread, until the block ends."""
    found = Interrupts()
    is_main = threading.current_thread() is threading.main_thread()
    taken = [n for n in SIGNALS if is_main and signal.getsignal(n) == signal.default_int_handler]
    for number in taken:
        signal.signal(number, found.handle)
    try:
        yield found
    finally:
        for number in taken:
            signal.signal(number, signal.default_int_handler)
