"""A run that is told to stop saves the rounds that it has done."""

import signal

import pytest

import fedspd
from fedspd.experiment import interrupts, runner
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
