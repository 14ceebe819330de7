"""Commands of fedspd as processes that can be signalled, stopped and killed."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from fedspd.cli import comparison, main, paper, running  # noqa: F401  a fork imports nothing


class Command:
    """The command `fedspd ARGUMENTS` in a process and a process group of its own.

    It is a fork, which takes no time to import torch. Its output goes into files of the new folder
    `log`. `prepare` is called in the new process.
    """

    def __init__(
        self, arguments: list[str], log: Path, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self.log = log
        log.mkdir()
        self.process = multiprocessing.get_context("fork").Process(
            target=_main, args=(arguments, log, prepare)
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def stderr(self) -> str:
        return (self.log / "stderr").read_text()

    @property
    def stdout(self) -> str:
        return (self.log / "stdout").read_text()

    @property
    def workers(self) -> list[int]:
        return [pid for pid in _processes() if _parent(pid) == self.process.pid]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ctrl_c(self) -> None:
        """Send SIGINT to the whole group, as a terminal does."""
        os.killpg(self.pid, signal.SIGINT)

    def end(self) -> int:
        """Return its exit code, once it has ended by itself."""
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join()


def _main(arguments: list[str], log: Path, prepare: Callable[[], None]) -> None:
    gc.freeze()  # or it would destroy gRPC's objects of other tests, whose threads are not here
    gc.callbacks.clear()  # hypothesis has one: a KeyboardInterrupt in it would be lost
    sys.unraisablehook = sys.__unraisablehook__  # in place of pytest's own, which says nothing
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background ignores it
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(log / name, os.O_CREAT | os.O_WRONLY), stream)
    sys.stdout, sys.stderr = (
        os.fdopen(stream, "w", closefd=False) for stream in (1, 2)
    )  # in place of pytest's own
    sys.argv = ["fedspd", *arguments]
    sys.path.insert(0, "")  # as python -m does
    prepare()
    main.main()


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int | None:
    return int(fields[1]) if (fields := stat_fields(pid)) else None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, or nothing if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
