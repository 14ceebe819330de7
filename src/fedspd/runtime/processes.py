"""What every training process of ours has to see to."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from fedspd.core.errors import ConfigError
from fedspd.core.machine import HAS_FORK

STOPPING = {signal.SIGINT, signal.SIGTERM}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
MEGABYTE = 1 << 20


def keep_memory() -> None:
    """A step frees and wants back the same few megabytes; the allocator would return them to the system every time, and
    the page faults cost a twentieth of the training. A C library without mallopt is left as it is.
    """
    if (mallopt := _of_c_library("mallopt")) is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * MEGABYTE)
        mallopt(M_TRIM_THRESHOLD, 256 * MEGABYTE)


def give_memory_back() -> None:
    """Of what was kept, all that is free now: a list with a model of every client leaves as much behind as they took."""
    if (malloc_trim := _of_c_library("malloc_trim")) is not None:
        malloc_trim(0)


def _of_c_library(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


def require_fork(purpose: str) -> None:
    """Refuse what runs in forks of this process on a system that has none."""
    if not HAS_FORK:
        raise ConfigError(
            f"{purpose} needs a system that can fork a process, such as Linux or macOS."
        )


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
