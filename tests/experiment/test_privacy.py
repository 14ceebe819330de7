"""Simulated clients stop at their budget, and a resumed run knows what they have spent."""

import json

import pytest

import fedspd
from fedspd.experiment.callbacks import Callback
from fedspd.experiment.spending import silent_clients
from fedspd.privacy.accounts import Limit
from fedspd.privacy.budget import Budget
from fedspd.privacy.ledger import RunLedger
from fedspd.storage.run_folder import RunFolder

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


def test_ledger_has_what_newcomers_received(tmp_path):
    """Two clients never train the same cluster, so that only the newcomer receives anything."""
    fedspd_options = {"align_every": 0, "final_epochs": 0}
    about = {"method": "fedspd", "fedspd": fedspd_options, "clients": 2, "holdout_clients": 1}
    run = fedspd.run(TREE | about, out=tmp_path / "run")
    assert max(events_of(tmp_path / "run")[-1]["privacy"]["epsilon"]) == 0
    ledger = RunLedger(2, 1e-5)
    ledger.restore(RunFolder(tmp_path / "run").events())
    ((sender, newcomer),) = run.summary["newcomers"]["edges"]
    assert ledger.received == {(sender, newcomer): 5}
    assert ledger.against_all(sender) == pytest.approx(run.summary["epsilon"], abs=1e-6)
    assert run.summary["epsilon"] == pytest.approx(4.0, abs=0.01)
    assert ledger.against_all(1 - sender) == 0


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
