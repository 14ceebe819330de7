"""A run that is told to stop saves the rounds that it has done."""

import multiprocessing
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest

import fedspd
from fedspd.config import validate
from fedspd.engines.simulator import Simulator
from fedspd.experiment import interrupts, runner
from fedspd.experiment.build import build_experiment
from fedspd.storage.run_folder import RunFolder

TINY = {"method": "fedavg", "clients": 3, "rounds": 6, "data": {"examples": 10}}


class Stop(fedspd.Callback):
    def __init__(self, times):
        self.times = times

    def on_round(self, event):
        if event["round"] == 3:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


@pytest.fixture
def rare_checkpoints(monkeypatch):
    """Save after round 1 alone, as where a checkpoint takes long; Ctrl-C raises as usual."""
    monkeypatch.setattr(runner, "CHECKPOINT_SHARE", 1e-9)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("rare_checkpoints")
@pytest.mark.parametrize(("times", "saved"), [(1, 3), (2, 1)])
def test_ctrl_c_saves_the_rounds_unless_it_is_repeated(times, saved, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fedspd.run(TINY, out=tmp_path / "a", callbacks=[Stop(times)])
    assert RunFolder(tmp_path / "a").latest()[1]["round"] == saved
    resumed = fedspd.run(out=tmp_path / "a", resume=True)
    assert resumed.summary["hash"] == fedspd.run(TINY).summary["hash"]


def test_signal_waits_only_for_rounds_that_would_be_lost():
    found = interrupts.Interrupts()
    with pytest.raises(KeyboardInterrupt):
        found.handle(signal.SIGINT, None)


@pytest.mark.usefixtures("rare_checkpoints")
@pytest.mark.parametrize(("kind", "saved"), [("start", None), ("round", 1), ("final", 7)])
def test_ctrl_c_that_python_loses_ends_the_run(kind, saved, tmp_path, loses_ctrl_c):
    with pytest.raises(KeyboardInterrupt):
        fedspd.run(TINY, out=tmp_path / "a", callbacks=[loses_ctrl_c(kind)])
    latest = RunFolder(tmp_path / "a").latest()
    assert (latest and latest[1]["round"]) == saved


def test_ctrl_c_that_was_lost_before_a_run_ends_it_at_its_start(tmp_path, loses_ctrl_c):
    """A command waits for signals while it imports what it needs."""

    def command():
        with interrupts.interrupts():
            loses_ctrl_c("start").on_start({"event": "start"})
            fedspd.run(TINY, out=tmp_path / "a")

    with pytest.raises(KeyboardInterrupt):
        command()
    assert not (tmp_path / "a").exists()


class StartedError(Exception):
    pass


class Started(fedspd.Callback):
    def on_start(self, event):
        sys.setprofile(None)

    def on_round(self, event):
        raise StartedError


def start_engine():
    with closing(Simulator(build_experiment(validate(TINY)).plan, workers=2)):
        sys.setprofile(None)
        raise StartedError


def start_run():
    fedspd.run(TINY, workers=2, callbacks=[Started()])


def is_stopped(start, files, step):
    """Send Ctrl-C at a call of a start with two workers; return whether it has so many calls."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.endswith(files)
        if calls == step:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(count)
    try:
        start()
    except (KeyboardInterrupt, StartedError) as end:
        return isinstance(end, KeyboardInterrupt)
    finally:
        sys.setprofile(None)


PACKAGE = tuple(str(path) for path in Path(fedspd.__file__).parent.rglob("*.py"))


@pytest.mark.usefixtures("rare_checkpoints", "loses_ctrl_c")  # a step may be in a finaliser
@pytest.mark.parametrize(
    ("start", "files"),
    [
        (start_engine, ("runtime/processes.py",)),
        pytest.param(start_run, PACKAGE, marks=pytest.mark.long),
    ],
)
def test_ctrl_c_at_every_step_of_a_start_ends_it_and_its_workers(start, files):
    step = 1
    while is_stopped(start, files, step):
        assert multiprocessing.active_children() == []
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
        step += 1
    assert step > 5
