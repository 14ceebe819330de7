"""Every optimizer has one hash: workers, blocks, a resumed run and peers, in loop and stack."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fedspd.core.learner import Learner, TrainingOptions, cross_entropy, squared_error
from fedspd.testing.subject import ROUNDS, _classifier, _regression

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


@pytest.mark.parametrize("task", ["classes", "regression"])
@pytest.mark.parametrize("name", TRAINING)
def test_optimizer_has_one_hash(subjects, name, task, one_hash):
    plan = partial(plan_of, subjects["fedspd"], task, TRAINING[name])
    assert one_hash(plan) != subjects["fedspd"].reference(task)


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINING)
def test_optimizer_has_one_hash_with_every_method(subject, method, name, one_hash):
    if method == "pfedme" and name == "adamw":
        pytest.skip("pFedMe takes gradient steps of its own and refuses adamw")
    one_hash(partial(plan_of, subject, "classes", TRAINING[name]))
