"""Real processes that run the command line, and ways to end them."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedspd
from fedspd.cli import main, running  # noqa: F401  a fork then finds everything imported
from fedspd.experiment.runner import Result
from fedspd.storage.run_folder import RunFolder

TINY = [
    "clients=6",
    "data.examples=24",
    "topology.degree=2",
    "training.epochs=1",
    "training.batch=8",
    "fedspd.final_epochs=1",
]


class Command:
    """`fedspd ARGUMENTS` in a process and a process group of its own; what it prints goes into files."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.log = log
        log.mkdir()
        self.process = multiprocessing.get_context("fork").Process(
            target=_main, args=(arguments, log)
        )
        self.process.start()

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
        os.kill(self.process.pid, number)

    def ctrl_c(self) -> None:
        """What a terminal does: the signal goes to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, seconds: float = 60) -> int:
        """Its exit code, once it has ended by itself."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s"
        return self.process.exitcode

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join()


def _main(arguments: list[str], log: Path) -> None:
    os.setpgid(0, 0)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(log / name, os.O_CREAT | os.O_WRONLY), stream)
    sys.stdout, sys.stderr = (
        os.fdopen(stream, "w", closefd=False) for stream in (1, 2)
    )  # in place of pytest's own
    sys.argv = ["fedspd", *arguments]
    main.main()


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int | None:
    return int(fields[1]) if (fields := _stat(pid)) else None


def _stat(pid: int) -> list[str]:
    """What follows the name in /proc/PID/stat: state, parent, ...; nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


class Lab:
    """Tiny runs: in this process, or in one that can be killed."""

    tiny = TINY

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[Command] = []

    def start(self, *arguments: object) -> Command:
        self.commands.append(
            Command(
                [str(argument) for argument in arguments], self.folder / f"log-{len(self.commands)}"
            )
        )
        return self.commands[-1]

    def start_run(self, *settings: str, workers: int = 2) -> tuple[Command, Path]:
        """A tiny run and its folder."""
        out = self.folder / f"run-{len(self.commands)}"
        return self.start("run", *TINY, *settings, "--out", out, "--workers", workers), out

    def whole(self, *settings: str, out: Path | None = None) -> Result:
        """The same run without interruption, by one worker."""
        return fedspd.run(fedspd.load(overrides=[*TINY, *settings]), out=out)

    def resumed(self, out: Path, workers: int = 1) -> Result:
        return fedspd.run(out=out, resume=True, workers=workers)

    @staticmethod
    def until(condition: Callable[[], Any], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.002)

    @staticmethod
    def cpu_seconds(pid: int) -> float:
        return int(_stat(pid)[11]) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def gone(pid: int) -> bool:
        return not _stat(pid)

    @staticmethod
    def rounds(out: Path) -> int:
        return max((event["round"] for event in RunFolder(out).events()), default=0)

    @staticmethod
    def timeless(out: Path) -> list[dict[str, Any]]:
        """The events of a run without what a clock says."""
        return [
            {key: value for key, value in event.items() if key != "seconds"}
            for event in RunFolder(out).events()
        ]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    for command in lab.commands:
        if command.process.is_alive():
            command.kill()
