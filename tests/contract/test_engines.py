"""The result is the method's: no engine, block, worker, interruption or global random number changes a bit of it."""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def test_every_engine_gives_the_same_bits(lab, method, task, engine):
    used = lab.run(engine(lab.plan(method, task)), lab.path(), 4)
    used.finish(5)
    assert tuple(used.digests()) == lab.reference(method, task)


@settings(
    max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(block_of=st.permutations([0, 0, 1, 1, 2]), order=st.permutations(range(5)))
def test_any_partition_into_blocks_in_any_order_gives_the_same_bits(lab, method, block_of, order):
    blocks = [[i for i in order if block_of[i] == b] for b in range(3)]
    used = lab.run(lab.by_hand(lab.plan(method), blocks), lab.path(), 4)
    used.finish(5)
    assert tuple(used.digests()) == lab.reference(method, "classes")


def test_resuming_in_the_middle_is_exact(lab, method, engine, tmp_path):
    before = lab.run(engine(lab.plan(method)), lab.path(), 2)
    before.save(tmp_path)
    after = engine(lab.plan(method))
    after.load(tmp_path)
    assert after.digests() == before.digests()
    lab.run(after, lab.path(), 4, first=3).finish(5)
    assert tuple(after.digests()) == lab.reference(method, "classes")


def test_a_round_can_be_repeated_because_it_leaves_the_old_state_alone(lab, method):
    used = lab.run(lab.by_hand(lab.plan(method)), lab.path(), 2)
    states, digests = [runner.state for runner in used.runners], used.digests()
    again = []
    for _ in range(2):
        for runner, state in zip(used.runners, states, strict=True):
            runner.state = state
        assert used.digests() == digests
        used.round(3, lab.path())
        used.finish(4)
        again.append(used.digests())
    assert again[0] == again[1]
    assert again[0] != digests


def test_global_randomness_is_neither_used_nor_changed(lab, method):
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    used = lab.run(lab.by_hand(lab.plan(method)), lab.path(), 4)
    used.finish(5)
    assert tuple(used.digests()) == lab.reference(method, "classes")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_other_seeds_give_other_results(lab, method):
    plan = lab.plan(method)
    digests = []
    for seed in (1, 2):
        used = lab.by_hand(plan.__class__(**{**vars(plan), "key": plan.key.__class__(seed)}))
        digests.append(lab.run(used, lab.path(), 2).digests())
    assert all(one != other for one, other in zip(*digests, strict=True))


def test_every_client_is_measured(lab, method, task, engine):
    used = lab.run(engine(lab.plan(method, task)), lab.path(), 2)
    used.finish(3)
    measures = used.measure()
    assert measures.test_loss_C.shape == measures.accuracy_C.shape == (5,)
    assert np.isfinite(measures.test_loss_C).all()
    assert np.isfinite(measures.accuracy_C).all() == (task == "classes")
    if measures.mixture_CS is not None:
        assert measures.mixture_CS.sum(1) == pytest.approx(
            np.ones(5), abs=3e-4
        )  # FedSoft's sigma comes on top of 1
