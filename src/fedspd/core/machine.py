"""The machine that this process runs on."""

import os

IS_POSIX = os.name == "posix"
HAS_FORK = hasattr(os, "fork")  # Windows has no fork
# The cores that this process may use.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
DEFAULT_WORKERS = CORES if HAS_FORK else 1
