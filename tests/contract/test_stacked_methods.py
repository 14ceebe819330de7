"""Every method with clients that train together, against the loop: the same in float64 to 1e-12.

Rounding differs by the last bit, so clusters would differ only where two losses are as close.
"""

import pytest
import torch
from torch import Tensor

from fedspd.algorithms import METHODS
from fedspd.config import load
from fedspd.core.stacked import StackedTrainer
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import build_experiment

SETTINGS = [
    *("dtype=float64", "clients=6", "rounds=4", "data.examples=14", "data.test_examples=5"),
    *("training.batch=5", "training.epochs=2", "fedspd.align_every=3", "fedspd.final_epochs=2"),
    "training.weight_decay=0.01",
]


def final_tables(method: str, model: str) -> tuple[bool, dict[str, Tensor]]:
    """Whether clients trained together, and the state of a run."""
    settings = [*SETTINGS, f"method={method}", f"model.name={model}"]
    experiment = build_experiment(load(None, settings))
    engine = Simulator(experiment.plan)
    engine.begin()
    for t in range(1, 5):
        engine.round(t, experiment.topology.at(t))
    engine.finish(5)
    return experiment.plan.learner.stacked_trainer is not None, engine.block.tables()


@pytest.mark.parametrize("model", ["mlp", pytest.param("linear", marks=pytest.mark.long)])
@pytest.mark.parametrize("method", METHODS)
def test_method_ends_in_the_same_state_as_in_the_loop(method, model, monkeypatch):
    is_stacked, found = final_tables(method, model)
    assert is_stacked
    monkeypatch.setattr(StackedTrainer, "build", classmethod(lambda *_: None))
    is_stacked, expected = final_tables(method, model)
    assert not is_stacked
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        torch.testing.assert_close(found[name], table, rtol=0.0, atol=1e-12, msg=name)
