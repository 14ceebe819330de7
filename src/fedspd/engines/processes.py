"""What every training process of ours has to see to."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

STOPPING = {signal.SIGINT, signal.SIGTERM}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
MEGABYTE = 1 << 20


def keep_memory() -> None:
    """A step frees and wants back the same few megabytes; the allocator would return them to the system every time, and
    the page faults cost a twentieth of the training. A C library without mallopt is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * MEGABYTE)
        mallopt(M_TRIM_THRESHOLD, 256 * MEGABYTE)


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
