"""The folder of a node's Unix sockets, which only its user can open."""

import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from fedspd.core.errors import StorageError
from fedspd.storage.lock import Lock

PREFIX = "fedspd-sockets-"
STARTING_SECONDS = 60.0  # a younger folder may belong to a node that has not locked it yet


class SocketFolder:
    """A new folder of mode 0700, locked as long as its process lives."""

    def __init__(self) -> None:
        """Make the folder, and remove those that killed nodes have left."""
        parent = Path(tempfile.gettempdir())
        for folder in parent.glob(f"{PREFIX}*"):
            with suppress(OSError, StorageError):  # in use, or another node removes it
                _remove_abandoned(folder)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = Lock(self.path)
        self._lock.acquire(f"'{self.path}'", 0.0)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder of this user whose process has ended."""
    found = os.lstat(folder)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or time.time() - found.st_ctime < STARTING_SECONDS:
        return
    lock = Lock(folder)
    lock.acquire(f"'{folder}'", 0.0)
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()
