"""The machine that this process runs on."""

import os
from pathlib import Path

from fedspd.core.errors import StorageError

IS_POSIX = os.name == "posix"
HAS_FORK = hasattr(os, "fork")  # Windows has no fork
# The cores that this process may use.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
DEFAULT_WORKERS = CORES if HAS_FORK else 1


def file_exists(path: Path) -> bool:
    """Return whether the file exists; raise StorageError if this user may not know."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StorageError(
            f"'{path}': cannot be read ({error.strerror}). Run the command as the user that owns "
            "it, or give another path."
        ) from None
    return True
