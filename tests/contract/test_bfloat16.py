"""bfloat16 in training and on the wire: one hash for workers, resume and peers; half the bytes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from fedspd.core.exchange import ExchangeOptions
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.core.precision import has_bfloat16
from fedspd.engines.simulator import Simulator
from fedspd.testing import StrictEngine
from fedspd.testing.subject import CLASSES, FEATURES, path_graph, run

needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16(), reason="this processor is not known to have bfloat16 instructions"
)
BFLOAT16 = ExchangeOptions(dtype="bfloat16")


def build_cnn():
    """A convolution, BatchNorm and dropout: examples become images of 2 x 2 pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        *(nn.Conv2d(1, 6, 2, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(54, CLASSES)),
    )


def plan_of(subject, exchange=None, precision="float32"):
    learner = Learner(build_cnn, TrainingOptions(batch=4, epochs=2), precision=precision)
    return replace(subject.plan(), learner=learner, exchange=exchange or ExchangeOptions())


@needs_bfloat16
@pytest.mark.parametrize("name", ["fedspd", pytest.param("fedspd-split", marks=pytest.mark.long)])
def test_training_in_bfloat16_has_one_hash(subjects, name, one_hash):
    plan = partial(plan_of, subjects[name], precision="bf16")
    assert one_hash(plan) != run(Simulator(plan_of(subjects[name])), path_graph())


@pytest.mark.parametrize("name", ["fedspd", pytest.param("fedspd-split", marks=pytest.mark.long)])
def test_models_sent_as_bfloat16_have_one_hash(subjects, name, one_hash):
    check_models_sent_as_bfloat16(subjects[name], name, one_hash)


@pytest.mark.long
def test_models_of_every_method_sent_as_bfloat16_have_one_hash(subject, method, one_hash):
    check_models_sent_as_bfloat16(subject, method, one_hash)


def check_models_sent_as_bfloat16(subject, name, one_hash):
    plan = partial(plan_of, subject, BFLOAT16)
    is_changed = one_hash(plan) != run(Simulator(plan_of(subject)), path_graph())
    assert is_changed == (name != "local")


def test_ledger_counts_two_bytes_per_parameter_of_a_model_and_four_of_other_vectors(subjects):
    """FedSoft sends its centers as models, and its chances as two numbers of four bytes."""
    engine = Simulator(plan_of(subjects["fedsoft"], BFLOAT16))
    engine.begin()
    P = engine.plan.learner.size
    sent = [(t.is_model, t.model_bytes) for t in engine.round(1, path_graph()).traffic]
    assert (True, 2 * P) in sent
    assert set(sent) <= {(True, 2 * P), (False, 8)}


def test_offered_models_are_rounded_to_bfloat16_and_other_vectors_are_not(subjects):
    """1 + 1/512 lies between the bfloat16 neighbours 1 and 1 + 1/128, nearer to 1."""
    engine = StrictEngine(plan_of(subjects["fedavg"], BFLOAT16))
    engine.begin()
    runner = engine.runners[0]
    runner.start_round(1)
    exchange = replace(runner.exchange, model_CKP=torch.full((1, 1, 2), 1 + 1 / 512))
    assert BFLOAT16.round(exchange).model_CKP.unique().tolist() == [1.0]
    assert BFLOAT16.round(exchange).model_CKP.dtype == torch.float32
    numbers = replace(exchange, is_model=False)
    assert BFLOAT16.round(numbers).model_CKP.unique().tolist() == [1 + 1 / 512]
    offered = runner.exchange.model_CKP
    assert torch.equal(offered, offered.bfloat16().float())
    assert ExchangeOptions().round(exchange) is exchange


@needs_bfloat16
def test_weights_gradients_and_evaluations_stay_in_float32(subjects):
    plan = plan_of(subjects["fedavg"], precision="bf16")
    learner, same = plan.learner, Learner(build_cnn)
    model_P = learner.draw(plan.key)
    trained_CP = learner.train(model_P[None].repeat(5, 1), plan.train, plan.key.at(1))
    assert trained_CP.dtype == learner.gradient.dtype == torch.float32
    assert not torch.equal(trained_CP, trained_CP.bfloat16().float())
    x = torch.randn(3, FEATURES)
    assert torch.equal(learner.outputs(model_P, x), same.outputs(model_P, x))
