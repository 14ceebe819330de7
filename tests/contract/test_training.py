"""Every optimizer has one hash: workers, blocks, a resumed run and peers, in loop and stack."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fedspd.core.learner import Learner, TrainingOptions, cross_entropy, squared_error
from fedspd.core.machine import HAS_FORK
from fedspd.engines.simulator import Simulator
from fedspd.testing import StrictEngine
from fedspd.testing.peers import run_peers
from fedspd.testing.subject import ROUNDS, _classifier, _regression, path_graph, run, run_rounds

TRAINING = {
    "adamw": TrainingOptions(batch=4, epochs=2, optimizer="adamw", lr=0.01, weight_decay=0.1),
    "clipped": TrainingOptions(batch=4, epochs=2, clip=0.1, schedule="cosine").over(ROUNDS),
}


def plan_of(subject, task, training):
    loss = cross_entropy if task == "classes" else squared_error
    dtype = torch.float32 if task == "classes" else torch.float64
    factory = _classifier if task == "classes" else _regression
    learner = Learner(factory, training, loss, dtype=dtype)
    return replace(subject.plan(task), learner=learner)


def check_one_hash(make_plan, tmp_path):
    graph = path_graph()
    expected = run(Simulator(make_plan()), graph)
    engine = Simulator(make_plan(), 3 if HAS_FORK else 1)
    assert run(engine, graph) == expected
    engine.close()
    for blocks in (None, [[4, 0], [3, 1], [2]]):
        assert run(StrictEngine(make_plan(), blocks), graph) == expected
    run_rounds(Simulator(make_plan()), graph, 1, 2).save(tmp_path)
    resumed = Simulator(make_plan())
    resumed.load(tmp_path)
    assert run(resumed, graph, first=3) == expected
    assert run_peers(make_plan(), graph, ROUNDS) == expected
    return expected


@pytest.mark.parametrize("task", ["classes", "regression"])
@pytest.mark.parametrize("name", TRAINING)
def test_optimizer_has_one_hash(subjects, name, task, tmp_path):
    plan = partial(plan_of, subjects["fedspd"], task, TRAINING[name])
    assert check_one_hash(plan, tmp_path) != subjects["fedspd"].reference(task)


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINING)
def test_optimizer_has_one_hash_with_every_method(subject, method, name, tmp_path):
    if method == "pfedme" and name == "adamw":
        pytest.skip("pFedMe takes gradient steps of its own and refuses adamw")
    check_one_hash(partial(plan_of, subject, "classes", TRAINING[name]), tmp_path)
