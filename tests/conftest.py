"""Shared test settings: one torch thread, so that parallel test processes do not compete for cores;
no deadline per example; one process for the tests of a file that share fixtures; and a callback
that keeps all events of a run."""

import gc
import logging
import os
import signal
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import fedspd

torch.set_num_threads(1)
# Tests fork after others have used gRPC. No child uses it, so its handlers must not wake it there.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
# A shell starts programs in the background with Ctrl-C ignored, and all that they start inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("fedspd", deadline=None, max_examples=50)
settings.load_profile("fedspd")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give tests that share a fixture of their module, or use Ray by name, to one process.

    `xdist_group` is for that, but with pytest 9.2, xdist 3.8 does not see its groups.
    """
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def shares_fixtures(path):
        return 'scope="module"' in path.read_text()

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            if Path(file).name.startswith("test_ray") or test.endswith("_on_ray"):
                return "ray"  # one cluster at a time
            return file if shares_fixtures(config.rootpath / file) else nodeid

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Spare the garbage collector, and every fork, what all tests have imported."""
    gc.collect()
    gc.freeze()


class EventLog(fedspd.Callback):
    """The callback that keeps all events of a run, in order."""

    def __init__(self):
        self.events = []
        self.alarms = []

    def on_start(self, event):
        self.events.append(event)

    on_round = on_final = on_start

    def on_alarm(self, round, alarm):
        self.alarms.append((round, alarm))


@pytest.fixture
def event_log():
    return EventLog()


class Loser:
    """What gets Ctrl-C in its finaliser, where Python only prints the exception of a handler."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


class LosesCtrlC(fedspd.Callback):
    """The callback that gets a Ctrl-C at each event of a kind, and loses its exception."""

    def __init__(self, kind):
        self.kind = kind

    def on_start(self, event):
        if event["event"] == self.kind:
            Loser()

    on_round = on_final = on_start


@pytest.fixture
def loses_ctrl_c(monkeypatch):
    """Return the class, where Ctrl-C raises as usual and lost exceptions are not reported."""
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield LosesCtrlC
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    signal.signal(signal.SIGINT, before)


GATED = '''\
"""Local-only training that waits in round 2 for as long as the file `hold` exists."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from fedspd.algorithms.local import Local


@dataclass(frozen=True)
class Gated(Local):
    def round(self, learner, state, data, key):
        while key.round == 2 and Path("hold").exists():
            Path(f"waiting-{os.getpid()}").touch()
            time.sleep(0.005)
        return (yield from super().round(learner, state, data, key))
'''


class Gate:
    """The method gated:Gated in the current folder, whose runs wait in round 2 until `open`."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "gated.py").write_text(GATED)
        (folder / "hold").touch()

    def wait(self):
        """Return the id of a process that waits."""
        while not (waiting := list(self.folder.glob("waiting-*"))):
            time.sleep(0.005)
        return int(waiting[0].name.partition("-")[2])

    def open(self):
        (self.folder / "hold").unlink(missing_ok=True)


@pytest.fixture
def gate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gate = Gate(tmp_path)
    yield gate
    gate.open()


def _save_blank(figure, to, **_):
    """Write nothing where the figure would be."""
    if not hasattr(to, "write"):
        Path(to).touch()


@pytest.fixture
def blank_figures(monkeypatch):
    """Draw figures and save them as empty files.

    A report takes two seconds to save. Tests that look at figures use `real_figures` as well.
    """
    from matplotlib.figure import Figure

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", _save_blank)
    return save


@pytest.fixture
def real_figures(blank_figures, monkeypatch):
    """Save figures as they are, in a file of tests whose other figures are blank."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", blank_figures)


@pytest.fixture(autouse=True)
def _fedspd_logger() -> Iterator[None]:
    """Restore the package's logger: a node that runs in a test sets its level and its handler."""
    logger = logging.getLogger("fedspd")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers = handlers
