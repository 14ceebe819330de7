"""Real processes that run the command line, and ways to end them."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedspd
from chaos.commands import Command, stat_fields
from fedspd.experiment.result import Result
from fedspd.storage import run_folder
from fedspd.storage.atomic import sync
from fedspd.storage.run_folder import RunFolder

TINY = [
    "method=held:Held",
    "clients=6",
    "data.examples=24",
    "topology.degree=2",
    "training.epochs=1",
    "training.batch=8",
    "options.final_epochs=1",
]


HELD = '''\
"""FedSPD that waits at a gate, for as long as the file `hold` names the round that begins."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from fedspd.algorithms.fedspd import FedSPD


@dataclass(frozen=True)
class Held(FedSPD):
    def round(self, learner, state, data, key):
        wait_at_gate(key.round)
        return (yield from super().round(learner, state, data, key))

    def finish(self, learner, state, data, key):
        wait_at_gate(key.round)
        return super().finish(learner, state, data, key)


def wait_at_gate(round):
    hold = Path("hold")
    while hold.exists() and hold.read_text() == str(round):
        Path(f"waiting-{os.getpid()}").touch()
        time.sleep(0.005)
'''


def _hold_checkpoints() -> None:
    run_folder.sync = _held_sync


def _held_sync(path: Path) -> None:
    """Wait for ever before the draft of the checkpoint that `hold-checkpoint` names is synced."""
    sync(path)
    hold = Path("hold-checkpoint")
    while hold.exists() and path.name.startswith(f"{hold.read_text()}.draft-"):
        Path("waiting-checkpoint").touch()
        time.sleep(0.005)


class Lab:
    """Tiny runs: in this process, or in one that can be killed."""

    tiny = TINY

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[Command] = []

    def start(self, *arguments: object) -> Command:
        self.commands.append(
            Command(
                [str(argument) for argument in arguments],
                self.folder / f"log-{len(self.commands)}",
                _hold_checkpoints,
            )
        )
        return self.commands[-1]

    def start_run(self, *settings: str, workers: int = 2) -> tuple[Command, Path]:
        """Start a tiny run; return it and its folder."""
        out = self.folder / f"run-{len(self.commands)}"
        return self.start("run", *TINY, *settings, "--out", out, "--workers", workers), out

    def start_held_run(self, round: int, *settings: str, workers: int = 2) -> tuple[Command, Path]:
        """Start a tiny run and return it when it waits in the middle of `round`, where it stays."""
        (self.folder / "hold").write_text(str(round))
        run, out = self.start_run(*settings, workers=workers)
        self.until(lambda: len(list(self.folder.glob("waiting-*"))) == workers)
        return run, out

    def start_held_checkpoint(self, round: int, *settings: str) -> tuple[Command, Path]:
        """Start a tiny run; return it when the checkpoint of `round` is not complete yet."""
        (self.folder / "hold-checkpoint").write_text(f"round-{round:06d}")
        run, out = self.start_run(*settings, workers=1)
        self.until((self.folder / "waiting-checkpoint").exists)
        return run, out

    def release(self) -> None:
        """Let every held run go on."""
        (self.folder / "hold").unlink()

    def whole(self, *settings: str, out: Path | None = None) -> Result:
        """Return the same run without interruption, by one worker."""
        return fedspd.run(fedspd.load(overrides=[*TINY, *settings]), out=out)

    def resumed(self, out: Path, workers: int = 1) -> Result:
        return fedspd.run(out=out, resume=True, workers=workers)

    @staticmethod
    def until(condition: Callable[[], Any], seconds: float = 600) -> None:
        """Wait for a condition; the limit is for a test that hangs, not a measurement."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it did not happen within {seconds} s"
            time.sleep(0.002)

    @staticmethod
    def cpu_seconds(pid: int) -> float:
        return int(stat_fields(pid)[11]) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def gone(pid: int) -> bool:
        return not stat_fields(pid)

    @staticmethod
    def rounds(out: Path) -> int:
        return max((event["round"] for event in RunFolder(out).events()), default=0)

    @staticmethod
    def timeless(out: Path) -> list[dict[str, Any]]:
        """Return the events of a run without their times."""
        return [
            {key: value for key, value in event.items() if key != "seconds"}
            for event in RunFolder(out).events()
        ]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank_figures: object) -> Iterator[Lab]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.py").write_text(HELD)
    lab = Lab(tmp_path)
    yield lab
    for command in lab.commands:
        if command.process.is_alive():
            command.kill()
