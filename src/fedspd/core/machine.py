"""The machine that we run on."""

import os

CORES = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)  # that this process may use
