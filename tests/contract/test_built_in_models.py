"""Every built-in model has one hash: workers, blocks, a resumed run and peers."""

from functools import partial

import pytest

from fedspd.config import load
from fedspd.experiment.build import build_experiment
from fedspd.models import MODELS
from fedspd.runtime.plan import Plan

SETTINGS = (
    *("clients=5", "rounds=4", "data.examples=7", "data.test_examples=3", "topology.degree=2"),
    *("training.batch=3", "training.epochs=1", "training.first_round_factor=1"),
    *("method=fedspd", "fedspd.final_epochs=1", "fedspd.align_every=3"),
)
OPTIONS = {"cifar-cnn": ["model.small=true"], "mlp": ["model.hidden=5"]}
LONG = ("cifar-cnn", "mobilenet-v2", "linear")


def plan_of(model: str) -> Plan:
    """Return the plan of five clients; their digits have 8 x 8 pixels."""
    settings = [*SETTINGS, f"model.name={model}", *OPTIONS.get(model, [])]
    return build_experiment(load(None, settings)).plan


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=pytest.mark.long) if m in LONG else m for m in MODELS]
)
def test_built_in_model_has_one_hash(model, one_hash):
    digests = one_hash(partial(plan_of, model))
    assert len(set(digests)) == 5  # the clients differ
