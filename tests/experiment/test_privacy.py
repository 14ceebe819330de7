"""Simulated clients stop at their budget, and a resumed run knows what they have spent."""

import json

import pytest

import fedspd
from fedspd.experiment.callbacks import Callback
from fedspd.experiment.spending import silent_clients
from fedspd.privacy.accounts import Limit
from fedspd.privacy.budget import Budget

TREE = {
    "method": "fedavg", "rounds": 5, "clients": 4, "evaluate_every": 1,
    "data": {"examples": 40, "test_examples": 10}, "topology": {"kind": "ring"},
    "training": {"epochs": 1, "batch": 20}, "privacy": {"epsilon": 4.0, "rate": 1.0},
}  # fmt: skip


class Crash(Callback):
    def on_round(self, event):
        if event["round"] == 4:
            raise RuntimeError("as if the machine had failed")


@pytest.fixture
def half_a_budget(monkeypatch):
    """The noise is chosen for the rounds, so that the budget is never spent unless it is lower."""
    monkeypatch.setattr(Budget, "limit", property(lambda budget: Limit(3.0, 1e-5)))


def events_of(folder):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if json.loads(line)["event"] == "round"]


def test_run_goes_on_without_clients_whose_budget_is_spent_also_when_resumed(
    tmp_path, half_a_budget
):
    whole = fedspd.run(TREE, out=tmp_path / "whole")
    rounds = events_of(tmp_path / "whole")
    sent = [event["traffic"][0]["transfers"] for event in rounds]
    first = sent.index(0)  # round of silence
    assert 0 < first < 4
    assert not any(sent[first:])
    assert rounds[first]["alarms"][-1].startswith("The privacy budget is spent at clients 0, 1, 2")
    assert len({event["steps"] for event in rounds[1:]}) == 1  # they go on training
    spent = [max(event["privacy"]["epsilon"]) for event in rounds]
    assert spent[first - 1] == spent[-1] <= 3.0
    assert "The privacy budget is spent" in " ".join(whole.summary["alarms"])
    assert silent_clients(tmp_path / "whole") == {0, 1, 2, 3}
    with pytest.raises(RuntimeError, match="as if"):
        fedspd.run(TREE, out=tmp_path / "broken", callbacks=[Crash()])
    resumed = fedspd.run(out=tmp_path / "broken", resume=True, workers=2)
    assert resumed.summary["hash"] == whole.summary["hash"]
    assert [e["privacy"] for e in events_of(tmp_path / "broken")] == [e["privacy"] for e in rounds]
