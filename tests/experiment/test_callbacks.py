"""Callbacks: what they are called with and when, and what the package's own ones write."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

import fedspd
from fedspd.core.errors import MissingExtraError
from fedspd.experiment.callbacks import notify
from fedspd.experiment.trackers import TensorBoard

TINY = {
    "method": "fedspd",
    "clients": 4,
    "rounds": 2,
    "data": {"examples": 24},
    "topology": {"degree": 2},
    "training": {"epochs": 1, "batch": 8},
}


def test_callback_receives_what_is_recorded(event_log):
    result = fedspd.run(TINY, callbacks=[event_log])
    start, *recorded = event_log.events
    config = start.pop("config")
    assert (config["method"], config["rounds"]) == ("fedspd", 2)
    assert "fedspd" in config
    assert "fedavg" not in config  # the options of another method
    assert start == {"event": "start", "round": 0, "rounds": 2, "method": "fedspd"}
    assert recorded == result.events()
    assert event_log.alarms == []


def test_callback_finds_its_round_in_the_records(tmp_path):
    lines = []

    class CountLines(fedspd.Callback):
        def on_round(self, event):
            lines.append(len((tmp_path / "a/events.jsonl").read_text().splitlines()))

        on_final = on_round

    fedspd.run(TINY, out=tmp_path / "a", callbacks=[CountLines()])
    assert lines == [1, 2, 3]


@pytest.mark.parametrize("method", ["on_start", "on_round", "on_final"])
def test_callback_that_fails_leaves_a_run_that_can_be_resumed(tmp_path, method):
    def fail(event):
        raise RuntimeError("the dashboard is gone")

    callback = fedspd.Callback()
    setattr(callback, method, fail)
    with pytest.raises(RuntimeError, match="the dashboard is gone"):
        fedspd.run(TINY, out=tmp_path / "a", callbacks=[callback])
    resumed = fedspd.run(out=tmp_path / "a", resume=True)
    assert resumed.summary["hash"] == fedspd.run(TINY).summary["hash"]


def test_callback_receives_every_alarm_of_an_event_with_its_round(event_log):
    event = {"event": "round", "round": 3, "alarms": ["It rains.", "It pours."]}
    notify([event_log, fedspd.Callback()], event)
    assert event_log.alarms == [(3, "It rains."), (3, "It pours.")]
    assert event_log.events == [event]


def test_callback_receives_the_alarms_of_a_run(event_log):
    config = TINY | {"method": "local", "training": {"lr": 1e6}}
    fedspd.run(config, callbacks=[event_log])
    sentence = "The loss is not finite at clients 0, 1, 2, 3: try a smaller training.lr."
    assert (2, sentence) in event_log.alarms


def test_tensorboard_writes_means_over_clients(monkeypatch, tmp_path):
    """A writer stands in for the one of the extra, which need not be installed."""
    writer = Mock()
    module = SimpleNamespace(SummaryWriter=Mock(return_value=writer))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    callback = TensorBoard(tmp_path)
    module.SummaryWriter.assert_not_called()  # a run that is refused leaves no folder behind
    start = {"event": "start", "round": 0, "rounds": 1}
    scores = {"accuracy": [0.5, None, 1.0], "loss": [], "purity": None}
    final = {"event": "final", "round": 2, "accuracy": [None], "test_loss": [3.0], "purity": 0.9}
    for event in (start, {"event": "round", "round": 1, **scores}, start, final):
        notify([callback], event)
    module.SummaryWriter.assert_called_once_with(str(tmp_path))
    assert writer.add_scalar.call_args_list == [
        call("accuracy", 0.75, 1),
        call("test_loss", 3.0, 2),
        call("purity", 0.9, 2),
    ]


def test_tensorboard_names_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fedspd\[tensorboard\]'"):
        TensorBoard(tmp_path)
