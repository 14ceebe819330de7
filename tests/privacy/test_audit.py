"""Audits that can fail: they find what is not private, and no more than a claim permits."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspd.algorithms.fedavg import FedAvg
from fedspd.core.block import Block
from fedspd.core.exchange import Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, LocalUpdate, TrainingOptions, cross_entropy, squared_error
from fedspd.core.mechanism import Mechanism
from fedspd.data.custom import load_source
from fedspd.data.federation import scale_inputs
from fedspd.privacy.accountant import epsilon
from fedspd.privacy.mechanisms import DPSGD
from fedspd.privacy.per_example import PerExampleGradients
from fedspd.privacy.randomness import Draws
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.plan import Plan
from privacy_audit import Attack, advantage_error, attainable_bound, permitted_advantage

DELTA = 1e-5
HALF_WAY = 0.5e-6  # of the step of one_step's canary, which both sides know
LONG = [pytest.mark.long, pytest.mark.timeout(7200)]  # minutes, an hour on a busy machine


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


@pytest.mark.parametrize("trials", [400, pytest.param(10_000, marks=LONG)])
def test_one_step_audit_finds_as_much_of_the_claim_as_its_trials_allow_and_no_more(trials):
    """What to expect follows from the number of trials: 1.25 of 4.38 with 400, 3.69 with 10,000."""
    mechanism = step_of(DPSGD)
    attack = one_step(mechanism, trials)
    assert claimed(mechanism) == pytest.approx(4.377, abs=1e-3)
    least = attainable_bound(1.0, trials, DELTA)
    assert least < attack.gaussian_bound(HALF_WAY, DELTA) < claimed(mechanism)
    assert attack.epsilon_bound(DELTA) < claimed(mechanism)


@pytest.mark.parametrize(
    ("share", "is_caught"),
    [pytest.param(*case, marks=LONG) for case in ((1.0, False), (0.8, True), (1.3, False))],
)
def test_audit_with_many_trials_catches_a_fifth_less_noise(share, is_caught):
    """It also tells that there is more noise than claimed: the bound is then below the least."""
    broken = step_of(DPSGD, noise=share)
    bound = one_step(broken, 10_000).gaussian_bound(HALF_WAY, DELTA)
    honest = claimed(step_of(DPSGD))
    assert (bound > honest) == is_caught
    assert (bound > attainable_bound(1.0, 10_000, DELTA)) == (share <= 1.0)


def test_attainable_bound_grows_with_the_trials_up_to_the_claim():
    found = [attainable_bound(1.0, trials, DELTA) for trials in (100, 400, 10_000, 10**8)]
    assert found == sorted(found)
    assert found[1] == pytest.approx(1.25, abs=0.05)
    assert found[2] == pytest.approx(3.69, abs=0.05)
    assert found[3] == pytest.approx(4.377, abs=0.02)


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


DIGITS, ROUNDS = 20, 2


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return real digits; the first one is the canary, whose label is wrong."""
    source = load_source("digits")
    x = scale_inputs(source.train.x[: 2 * DIGITS]).flatten(1)
    y = torch.from_numpy(np.asarray(source.train.y[: 2 * DIGITS])).long()
    y[0] = (y[0] + 5) % 10
    return x, y


def neighbour_view(mechanism: Mechanism | None, trial: int, has_canary: bool) -> float:
    """Return the canary's mean loss under the models that client 0 sends to its neighbour."""
    training = TrainingOptions(lr=0.2, momentum=0.5, batch=DIGITS, epochs=10, first_round_factor=1)
    learner = Learner(lambda: nn.Linear(64, 10), training, cross_entropy, mechanism=mechanism)
    x, y = digits()
    own, others = slice(0 if has_canary else 1, DIGITS), slice(DIGITS, None)
    data = Block([0, 1], 2, [x[own], x[others]], [y[own], y[others]], DIGITS)
    truth = [np.zeros(len(part), int) for part in data.y]
    key = Key(trial).of(str(has_canary))
    runner = BlockRunner(Plan(FedAvg(), learner, data, data, truth, 1, key))
    runner.begin()
    losses = []
    for t in range(1, ROUNDS + 1):
        runner.start_round(t)
        sent_P = runner.exchange.model_CKP[0, 0]
        losses.append(float(learner.loss(learner.outputs(sent_P, x[:1]), y[:1])))
        runner.advance(Neighbourhood.of(Graph.from_edges(2, [(0, 1)]), [0, 1], runner.exchange))
    return float(np.mean(losses))


def membership(mechanism: Mechanism | None, shadows: int) -> tuple[Attack, Attack]:
    """Attack the models that a neighbour receives: loss threshold, and likelihood ratio.

    The ratio compares a canary's loss with those under shadow models with and without it.
    """
    losses = {
        has: np.array([neighbour_view(mechanism, t, has) for t in range(2 * shadows)])
        for has in (True, False)
    }
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


def test_membership_of_a_digit_is_plain_without_privacy():
    """Nearly all canaries are found: by chance, less than once in a million."""
    for attack in membership(None, 15):
        assert attack.advantage() > 0.9


@pytest.mark.parametrize("shadows", [8, pytest.param(400, marks=LONG)])
def test_membership_of_a_digit_is_within_the_budget_with_privacy(shadows):
    mechanism, cost = private_mechanism()
    assert 0.5 < cost <= 1.0
    permitted = permitted_advantage(cost, 1e-3) + advantage_error(shadows)
    assert shadows < 100 or permitted < 0.7  # it means something: without privacy it is 0.9
    for attack in membership(mechanism, shadows):
        assert attack.epsilon_bound(1e-3) <= cost
        assert attack.advantage() <= permitted


def test_permitted_advantage_grows_to_one():
    assert permitted_advantage(0.0, 0.0) == 0.0
    assert permitted_advantage(1.0, 0.0) == pytest.approx(0.4621, abs=1e-4)
    assert permitted_advantage(8.0, 0.0) > 0.999


def test_attack_bound_equals_clopper_and_pearson():
    """All 200 members above and all 200 others below: at 95 %, log(0.9817 / 0.0183)."""
    attack = Attack(np.ones(200), np.zeros(200))
    assert attack.bound_at(0.5, 0.0) == pytest.approx(np.log(0.9817 / 0.0183), abs=0.01)
    assert attack.epsilon_bound(0.0) <= attack.bound_at(0.5, 0.0)
