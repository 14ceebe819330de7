"""What every forked process of ours has to see to."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

STOPPING = {signal.SIGINT, signal.SIGTERM}


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A child must not run the parent's handlers before it has set its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """A parent that was killed cannot stop its workers; they would go on to the end of a step, perhaps for minutes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
