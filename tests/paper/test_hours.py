"""The hours of an experiment, estimated from its configs."""

import pytest

from fedspd.config import validate
from fedspd.paper.hours import hours_of, run_seconds


def test_hours_count_shared_rounds_and_equal_runs_once(monkeypatch):
    monkeypatch.setattr("fedspd.paper.hours.step_seconds", lambda config: 1.0)
    plain, tuned = (validate({"method": "fedavg", "fedavg": {"finetune": n}}) for n in (0, 10))
    local = validate({"method": "local"})
    final = run_seconds(tuned, has_rounds=False)
    steps = tuned.clients * 10 * -(-300 // tuned.training.batch)
    assert steps < final < 1.2 * steps  # and one evaluation
    expected = run_seconds(plain) + final + run_seconds(local)
    assert hours_of([plain, tuned, tuned, local], 2) == pytest.approx(expected / 2 / 3600)


def test_hours_count_what_a_method_trains_in_a_round(monkeypatch):
    """FedEM trains every center; FedSPD one on its part, 180 of 300 examples: 4 of 6 batches."""
    monkeypatch.setattr("fedspd.paper.hours.step_seconds", lambda config: 1.0)
    monkeypatch.setattr("fedspd.paper.hours.FORWARD_SHARE", 0.0)
    options = {"final_epochs": 0}
    configs = {
        "fedavg": {},
        "fedem": {"clusters": 3},
        "fedspd": {"clusters": 3, "fedspd": options},
    }
    hours = {name: run_seconds(validate({"method": name, **c})) for name, c in configs.items()}
    assert hours["fedem"] == 3 * hours["fedavg"]
    assert hours["fedspd"] == pytest.approx(4 / 6 * hours["fedavg"])
