"""Factors on learning rates: `training.head_rate`, and `factor_W` of one call.

Shapes: C clients, P parameters of a model, W that are trained.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.core.vmapped import VmapTrainer

KEY = Key(0, 2)
ONE_STEP = {"batch": 100, "epochs": 1, "momentum": 0.0}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def learner_of(head: str | None = None, **training) -> Learner:
    options = TrainingOptions(**{"batch": 4, "epochs": 3, "momentum": 0.9, **training})
    return Learner(mlp, options, dtype=torch.float64, head=head)


def examples() -> Block:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(count, 4, generator=generator) for count in (9, 5)]
    return Block([0, 1], 2, x, [torch.arange(len(own)) % 3 for own in x], 9)


def first_models(learner: Learner) -> Tensor:
    """Random bodies with heads of zeros, so that a head after one step is the step itself."""
    model_CP = torch.stack([learner.draw(KEY.of(c)) for c in range(2)])
    learner.cut.head(model_CP).zero_()
    return model_CP


def test_head_rate_of_two_doubles_the_first_step_of_the_head_exactly():
    plain, doubled = learner_of(**ONE_STEP), learner_of(**ONE_STEP, head_rate=2.0)
    one, two = (own.train(first_models(own), examples(), KEY) for own in (plain, doubled))
    assert plain.cut.head(one).any()
    assert torch.equal(doubled.cut.head(two), 2 * plain.cut.head(one))
    assert torch.allclose(doubled.cut.body(two), plain.cut.body(one), rtol=0, atol=1e-15)


def test_head_rate_follows_the_named_head():
    first, plain = learner_of("0", **ONE_STEP, head_rate=2.0), learner_of(**ONE_STEP)
    start_CP = torch.stack([plain.draw(KEY.of(c)) for c in range(2)])
    step, named = (own.train(start_CP, examples(), KEY) - start_CP for own in (plain, first))
    assert torch.allclose(first.cut.head(named), 2 * first.cut.head(step))
    assert torch.allclose(first.cut.body(named), first.cut.body(step))


@pytest.mark.parametrize("vmapped", [False, True])
def test_factor_of_zero_freezes_against_decay_and_momentum(vmapped):
    learner = learner_of(weight_decay=0.1)
    learner.vmap_trainer = VmapTrainer(learner) if vmapped else None
    start_CP, factor_W = first_models(learner), torch.zeros(learner.weights, dtype=torch.double)
    learner.cut.head(factor_W).fill_(1)
    trained_CP = learner.train(start_CP, examples(), KEY, factor_W=factor_W)
    assert torch.equal(learner.cut.body(trained_CP), learner.cut.body(start_CP))
    assert (learner.cut.head(trained_CP) != learner.cut.head(start_CP)).all()


def test_head_rate_and_factor_multiply():
    plain, doubled = learner_of(), learner_of(head_rate=2.0)
    half_W = torch.ones(plain.weights, dtype=torch.double)
    plain.cut.head(half_W).fill_(0.5)
    expected = plain.train(first_models(plain), examples(), KEY)
    found = doubled.train(first_models(plain), examples(), KEY, factor_W=half_W)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_factors_train_the_same_one_by_one_and_together():
    loop, together = learner_of(head_rate=3.0), learner_of(head_rate=3.0)
    together.vmap_trainer = VmapTrainer(together)
    factor_W = torch.linspace(0, 2, loop.weights, dtype=torch.double)
    one, two = (
        own.train(first_models(own), examples(), KEY, factor_W=factor_W) for own in (loop, together)
    )
    assert torch.allclose(one, two, rtol=0, atol=1e-9)


def test_head_of_a_split_model_is_v_and_every_offset():
    first_steps = []
    for head_rate in (1.0, 2.0):
        split = learner_of(**ONE_STEP, head_rate=head_rate).split(2)
        model_CP = first_models(split.plain)
        zeros_CSQ = torch.zeros(2, 2, split.head_size, dtype=torch.double)
        model_CA = split.join(model_CP, zeros_CSQ, torch.zeros(2, 3))
        weight_CES = torch.tensor([0.25, 0.75]).expand(2, 9, 2)
        trained_CP, offsets_CSQ = split.separate(
            split.train(model_CA, examples(), KEY, weight_CE=weight_CES)
        )
        first_steps.append((split.plain.cut.head(trained_CP), offsets_CSQ))
        body_CB = split.plain.cut.body(trained_CP - model_CP)
        assert body_CB.abs().max() == 0, "under heads of zeros the body has no gradient"
    for one, two in zip(*first_steps, strict=True):
        assert one.flatten(0, -2).any(1).all(), "every head learned"
        assert torch.equal(two, 2 * one)


def test_default_multiplies_nothing():
    assert learner_of()._rate_factor(None) is None


def test_model_without_a_linear_layer_trains_without_a_head():
    learner = Learner(
        lambda: nn.Sequential(nn.Conv1d(4, 3, 1), nn.Flatten()), TrainingOptions(batch=4, epochs=1)
    )
    data = examples()
    data = Block([0], 1, [data.x[0][:, :, None]], [data.y[0]], 9)
    start_CP = learner.draw(KEY)[None]
    losses = [learner.mean_losses(start_CP, data).item()]
    for t in range(2, 5):
        start_CP = learner.train(start_CP, data, KEY.at(t))
        losses.append(learner.mean_losses(start_CP, data).item())
    assert all(later < earlier for earlier, later in pairwise(losses))
