"""The built-in models have one hash: workers, blocks, a resumed run and peers.

MobileNet-v2 is not among them: it takes minutes, and its steps are those of the CIFAR CNN.
"""

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
LONG = ("cifar-cnn", "linear")
SMALL_ENOUGH = [name for name in MODELS if name != "mobilenet-v2"]


def plan_of(model: str) -> Plan:
    """Return the plan of five clients; their digits have 8 x 8 pixels."""
    settings = [*SETTINGS, f"model.name={model}", *OPTIONS.get(model, [])]
    return build_experiment(load(None, settings)).plan


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=pytest.mark.long) if m in LONG else m for m in SMALL_ENOUGH]
)
def test_built_in_model_has_one_hash(model, one_hash):
    digests = one_hash(partial(plan_of, model))
    assert len(set(digests)) == 5  # the clients differ
