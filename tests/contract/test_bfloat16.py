"""bfloat16 in training and on the wire: one hash for workers, resume and peers; half the bytes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from fedspd.core.exchange import ExchangeOptions
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.core.machine import HAS_FORK
from fedspd.core.precision import has_bfloat16
from fedspd.engines.simulator import Simulator
from fedspd.testing import StrictEngine
from fedspd.testing.peers import run_peers
from fedspd.testing.subject import CLASSES, FEATURES, ROUNDS, path_graph, run, run_rounds

needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16(), reason="this processor is not known to have bfloat16 instructions"
)
WORKERS = (2, 3) if HAS_FORK else ()  # besides one
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


def check_one_hash(make_plan, tmp_path):
    """Every engine, a resumed run and real messages end with the same bits."""
    graph = path_graph()
    expected = run(Simulator(make_plan()), graph)
    for workers in WORKERS:
        engine = Simulator(make_plan(), workers)
        assert run(engine, graph) == expected, f"workers = {workers}"
        engine.close()
    assert run(StrictEngine(make_plan()), graph) == expected
    run_rounds(Simulator(make_plan()), graph, 1, 2).save(tmp_path)
    resumed = Simulator(make_plan())
    resumed.load(tmp_path)
    assert run(resumed, graph, first=3) == expected
    assert run_peers(make_plan(), graph, ROUNDS) == expected
    return expected


@needs_bfloat16
@pytest.mark.parametrize("name", ["fedspd", pytest.param("fedspd-split", marks=pytest.mark.long)])
def test_training_in_bfloat16_has_one_hash(subjects, name, tmp_path):
    plan = partial(plan_of, subjects[name], precision="bf16")
    assert check_one_hash(plan, tmp_path) != run(Simulator(plan_of(subjects[name])), path_graph())


@pytest.mark.parametrize("name", ["fedspd", pytest.param("fedspd-split", marks=pytest.mark.long)])
def test_models_sent_as_bfloat16_have_one_hash(subjects, name, tmp_path):
    check_models_sent_as_bfloat16(subjects[name], name, tmp_path)


@pytest.mark.long
def test_models_of_every_method_sent_as_bfloat16_have_one_hash(subject, method, tmp_path):
    check_models_sent_as_bfloat16(subject, method, tmp_path)


def check_models_sent_as_bfloat16(subject, name, tmp_path):
    plan = partial(plan_of, subject, BFLOAT16)
    is_changed = check_one_hash(plan, tmp_path) != run(Simulator(plan_of(subject)), path_graph())
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
