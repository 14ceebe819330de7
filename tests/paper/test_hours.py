"""The hours of an experiment, estimated from its configs."""

from itertools import chain
from types import SimpleNamespace

import pytest

from fedspd.config import validate
from fedspd.paper import hours
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


def test_step_is_timed_warm_and_once_for_all_datasets_of_its_shape(monkeypatch):
    """MobileNet-v2's first two steps took 1.36 and 0.82 s, all later ones about 0.53 s."""
    ticks = chain.from_iterable((0.0, seconds) for seconds in (1.36, 0.82, 0.53))
    clock = SimpleNamespace(process_time=ticks.__next__)
    monkeypatch.setattr(hours, "time", clock)
    hours._timed_step.cache_clear()
    settings = {"model": {"name": "mlp"}, "training": {"batch": 7}}
    for name in ("cifar10", "cifar100"):
        config = validate({**settings, "data": {"name": name}})
        assert hours.step_seconds(config) == 0.53
    hours._timed_step.cache_clear()
