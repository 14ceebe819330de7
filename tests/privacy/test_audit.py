"""Audits that can fail: they find what is not private, and no more than a claim permits."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, LocalUpdate, TrainingOptions, cross_entropy, squared_error
from fedspd.core.mechanism import Mechanism
from fedspd.privacy.accountant import epsilon
from fedspd.privacy.audit import Attack, permitted_advantage
from fedspd.privacy.mechanisms import DPSGD
from fedspd.privacy.per_example import PerExampleGradients
from fedspd.privacy.randomness import Draws

DELTA = 1e-5


# ---- one step of the mechanism alone


def canary_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1, bias=False), nn.Flatten(0))


def one_step(mechanism: Mechanism, trials: int) -> Attack:
    """Attack one step: the canary's gradient points along the first axis, with a huge norm.

    The score is the step along that axis. Both sides know all else.
    """
    training = TrainingOptions(lr=1.0, momentum=0.0, batch=1, epochs=1)
    learner = Learner(canary_model, training, squared_error, mechanism=mechanism)
    start, scores = torch.zeros(1, 2), []
    for name, count in (("with", 1), ("without", 0)):
        data = Block([0], 1, [torch.tensor([[50.0, 0.0]])[:count]], [torch.ones(1)[:count]], 1)
        steps = [
            learner.train(start, data, Key(trial, 1).of(name), rates=[1e-6])[0, 0]
            for trial in range(trials)
        ]
        scores.append(torch.stack(steps).double().numpy())
    return Attack(*scores)


@dataclass(frozen=True)
class WithoutNoise(DPSGD):
    """It claims noise and draws a tenth of it."""

    def _train_client(self, learner, gradients, model_P, update, key):
        weaker = replace(self, noise=self.noise / 10)
        return DPSGD._train_client(weaker, learner, gradients, model_P, update, key)


@dataclass(frozen=True)
class WithoutClipping(DPSGD):
    """It leaves gradients as long as they are."""

    def _train_client(self, learner, gradients, model_P, update, key):
        return super()._train_client(learner, Unclipped(learner, self.clip), model_P, update, key)


class Unclipped(PerExampleGradients):
    def __init__(self, learner: Learner, clip: float) -> None:
        super().__init__(learner)

    def clipped_sum(
        self, model_P: Tensor, update: LocalUpdate, rows: Tensor, clip: float
    ) -> Tensor:
        return super().clipped_sum(model_P, update, rows, 1e9)


@dataclass(frozen=True)
class WithAnotherRate(DPSGD):
    """It claims a sample and takes every example."""

    def _batches(self, update: LocalUpdate, draws: Draws):
        for rate, _ in super()._batches(update, draws):
            yield rate, torch.arange(len(update.y))


def step_of(kind: type[DPSGD], rate: float = 1.0, noise: float = 1.0) -> DPSGD:
    return kind(noise=noise, clip=1.0, rate=rate, mean_noise=1.0)


def claimed(mechanism: DPSGD) -> float:
    return epsilon([mechanism.update_release(1)], DELTA)


@pytest.mark.parametrize(
    ("trials", "least"), [(400, 2.0), pytest.param(10_000, 3.6, marks=pytest.mark.long)]
)
def test_one_step_audit_finds_most_of_the_claim_and_no_more(trials, least):
    """With 5,000 counted trials the bound is 4.0 on average; 3.6 is three standard errors below."""
    mechanism = step_of(DPSGD)
    attack = one_step(mechanism, trials)
    assert claimed(mechanism) == pytest.approx(4.377, abs=1e-3)
    assert least < attack.gaussian_bound(DELTA) < claimed(mechanism)
    assert attack.epsilon_bound(DELTA) < claimed(mechanism)


@pytest.mark.parametrize(
    ("broken", "rate", "noise"),
    [(WithoutNoise, 1.0, 6.0), (WithoutClipping, 1.0, 6.0), (WithAnotherRate, 0.1, 3.0)],
)
def test_broken_mechanism_is_caught(broken, rate, noise):
    """Each claims an epsilon that its audit refutes; the honest mechanism passes."""
    mechanism = step_of(broken, rate, noise)
    assert one_step(mechanism, 200).epsilon_bound(DELTA) > claimed(mechanism)
    honest = step_of(DPSGD, rate, noise)
    assert one_step(honest, 200).epsilon_bound(DELTA) <= claimed(honest)


# ---- membership inference against what a neighbour sees


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return examples whose labels are noise: a model can only remember them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 20, generator=generator)
    return x, torch.randint(4, (count,), generator=generator)


def membership(mechanism: Mechanism | None, shadows: int) -> tuple[Attack, Attack]:
    """Attack the model that a neighbour receives: loss threshold, and likelihood ratio.

    The ratio compares a canary's loss with those under shadow models with and without it.
    """
    training = TrainingOptions(lr=0.2, momentum=0.5, batch=20, epochs=20, first_round_factor=1)
    x, y = digits(20, 0)

    def loss(trial: int, has_canary: bool) -> float:
        rows = slice(0 if has_canary else 1, None)
        learner = Learner(lambda: nn.Linear(20, 4), training, cross_entropy, mechanism=mechanism)
        data = Block([0], 1, [x[rows]], [y[rows]], 20)
        start = learner.draw(Key(0))[None]
        model_CP = learner.train(start, data, Key(trial, 1).of(str(has_canary)))
        return float(learner.loss(learner.outputs(model_CP[0], x[:1]), y[:1]))

    losses = {has: np.array([loss(t, has) for t in range(2 * shadows)]) for has in (True, False)}
    seen, shadow = (
        {has: own[part] for has, own in losses.items()}
        for part in (slice(shadows), slice(shadows, None))
    )
    means = {has: own.mean() for has, own in shadow.items()}
    spread = {has: own.std() + 1e-6 for has, own in shadow.items()}

    def ratio(value: np.ndarray) -> np.ndarray:
        logs = {has: -((value - means[has]) / spread[has]) ** 2 / 2 - np.log(spread[has])
                for has in (True, False)}  # fmt: skip
        return logs[True] - logs[False]

    return Attack(-seen[True], -seen[False]), Attack(ratio(seen[True]), ratio(seen[False]))


def private_mechanism() -> tuple[DPSGD, float]:
    """Return a mechanism whose 20 epochs cost less than epsilon = 1 at delta = 1e-3."""
    mechanism = DPSGD(noise=18.0, clip=1.0, rate=1.0, mean_noise=1.0)
    return mechanism, epsilon([mechanism.update_release(20)], 1e-3)


@pytest.mark.parametrize("shadows", [30, pytest.param(300, marks=pytest.mark.long)])
def test_membership_is_plain_without_privacy_and_within_the_budget_with_it(shadows):
    for attack in membership(None, shadows):
        assert attack.advantage() > 0.9
    mechanism, cost = private_mechanism()
    assert 0.5 < cost <= 1.0
    error = 2 * np.sqrt(2 * 0.25 / shadows)  # of a difference of two rates
    for attack in membership(mechanism, shadows):
        assert attack.epsilon_bound(1e-3) <= cost
        assert attack.advantage() <= permitted_advantage(cost, 1e-3) + error
        assert abs(attack.auc() - 0.5) < 0.5 * permitted_advantage(cost, 1e-3) + error


def test_permitted_advantage_grows_to_one():
    assert permitted_advantage(0.0, 0.0) == 0.0
    assert permitted_advantage(1.0, 0.0) == pytest.approx(0.4621, abs=1e-4)
    assert permitted_advantage(8.0, 0.0) > 0.999


def test_attack_bound_equals_clopper_and_pearson():
    """All 200 members above and all 200 others below: at 95 %, log(0.9817 / 0.0183)."""
    attack = Attack(np.ones(200), np.zeros(200))
    assert attack.bound_at(0.5, 0.0) == pytest.approx(np.log(0.9817 / 0.0183), abs=0.01)
    assert attack.epsilon_bound(0.0) <= attack.bound_at(0.5, 0.0)
