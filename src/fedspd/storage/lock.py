"""A lock that one process holds at a time.

With flock, the system frees the lock when its process ends, however it ends. Where there is no
flock (Windows), a file marks the lock: a process that is killed leaves it, and a person deletes it.
"""

import atexit
import os
import time
from pathlib import Path

from fedspd.core.errors import StorageError

try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
except ImportError:
    HAS_FLOCK = False
else:
    HAS_FLOCK = True

RETRY_SECONDS = 0.05


class Lock:
    """The lock of an existing file or folder."""

    def __init__(self, target: Path) -> None:
        self.target = target.resolve()
        self.mark = self.target.with_name(f"{self.target.name}.held")
        self._handle: int | None = None

    def acquire(self, what: str, timeout_seconds: float) -> None:
        """Wait for the lock, and refuse when the time is over; `what` begins the sentence."""
        end = time.monotonic() + timeout_seconds
        while not self._try():
            if time.monotonic() > end:
                hint = "" if HAS_FLOCK else f" If there is none, delete '{self.mark}'."
                raise StorageError(
                    f"{what} is in use by another process: wait for it, or stop it.{hint}"
                )
            time.sleep(RETRY_SECONDS)

    def _try(self) -> bool:
        try:
            self._handle = _flocked(self.target) if HAS_FLOCK else _marked(self.mark)
        except (BlockingIOError, FileExistsError):
            return False
        if not HAS_FLOCK:
            atexit.register(self.release)
        return True

    def release(self) -> None:
        """Let others have the lock, if it is ours."""
        if self._handle is None:
            return
        if HAS_FLOCK:
            flock(self._handle, LOCK_UN)  # a fork has the lock too, and would keep it
        os.close(self._handle)
        self._handle = None
        if not HAS_FLOCK:
            self.mark.unlink(missing_ok=True)


def _flocked(target: Path) -> int:
    handle = os.open(target, os.O_RDONLY if target.is_dir() else os.O_RDWR)
    try:
        flock(handle, LOCK_EX | LOCK_NB)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _marked(mark: Path) -> int:
    return os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
