"""Clipping, noise and sampling, with numbers that a person can check."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import nn

from fedspd.algorithms.fedavg import FedAvg
from fedspd.algorithms.fedspd import FedSPD
from fedspd.core.block import Block
from fedspd.core.flat_module import keyed_randomness
from fedspd.core.keys import Key
from fedspd.core.learner import (
    Learner,
    LocalUpdate,
    TrainingOptions,
    cross_entropy,
    squared_error,
)
from fedspd.core.losses import weighted_loss
from fedspd.core.mechanism import Mechanism
from fedspd.core.sgd import Optimizer
from fedspd.privacy import randomness
from fedspd.privacy.mechanisms import DPSGD, NbAFL, NoisyUpdate
from fedspd.privacy.per_example import clipped
from fedspd.privacy.randomness import NoiseSource, SecretDraws, SeededDraws
from fedspd.runtime.block_runner import BlockRunner
from fedspd.testing import Subject

PLAIN = TrainingOptions(lr=1.0, momentum=0.0, batch=2, epochs=1, first_round_factor=1)


def two_parameters() -> nn.Module:
    """f(x) = w . x with w = (0, 0)."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Flatten(0))
    nn.init.zeros_(model[0].weight)
    return model


def learner_of(mechanism: Mechanism | None, training: TrainingOptions = PLAIN) -> Learner:
    return Learner(two_parameters, training, squared_error, mechanism=mechanism)


def block(x: list[list[float]], y: list[float]) -> Block:
    return Block([0], 1, [torch.tensor(x)], [torch.tensor(y)], len(y))


def test_dpsgd_step_equals_numbers_worked_by_hand():
    """At w = 0, the gradients are -y x: (-3, -4) has norm 5 and is clipped to (-0.6, -0.8);
    (-0.3, 0) stays. Their sum, over the batch of 2, is (-0.45, -0.4)."""
    mechanism = DPSGD(noise=0.0, clip=1.0, rate=1.0, mean_noise=0.0)
    learner = learner_of(mechanism)
    trained = learner.train(torch.zeros(1, 2), block([[3, 4], [0.3, 0]], [1, 1]), Key(0, 1))
    assert trained[0].tolist() == pytest.approx([0.45, 0.4])


def test_dpsgd_noise_is_added_to_the_sum_before_it_is_divided():
    mechanism = DPSGD(noise=3.0, clip=0.5, rate=1.0, mean_noise=0.0)
    trained = learner_of(mechanism).train(torch.zeros(1, 2), block([[3, 4]], [1]), Key(0, 1))
    draws = SeededDraws(Key(0, 1).of(0, "private"))
    draws.uniform(1)  # the sample
    noise = 3.0 * 0.5 * draws.normal(2).float()
    expected = -(torch.tensor([-0.3, -0.4]) + noise) / 2
    assert trained[0].tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_dpsgd_adds_noise_where_no_example_is_drawn():
    mechanism = DPSGD(noise=1.0, clip=1.0, rate=1.0, mean_noise=0.0)
    empty = Block([0], 1, [torch.zeros(0, 2)], [torch.zeros(0)], 1)
    assert learner_of(mechanism).train(torch.zeros(1, 2), empty, Key(0, 1)).abs().min() > 0


def test_example_whose_gradient_is_not_finite_counts_as_none():
    mechanism = DPSGD(noise=0.0, clip=1.0, rate=1.0, mean_noise=0.0)
    data = block([[math.inf, 0], [0.3, 0]], [1, 1])
    trained = learner_of(mechanism).train(torch.zeros(1, 2), data, Key(0, 1))
    assert trained[0].tolist() == pytest.approx([0.15, 0])


def test_noise_has_the_deviation_that_was_asked_for():
    mechanism = DPSGD(noise=2.0, clip=0.5, rate=1.0, mean_noise=0.0)
    wide = Learner(
        lambda: nn.Linear(100, 100, bias=False), PLAIN, squared_error, mechanism=mechanism
    )
    start = torch.zeros(1, 10_000)
    empty = Block([0], 1, [torch.zeros(0, 100)], [torch.zeros(0, 100)], 1)
    change = wide.train(start, empty, Key(0, 1))[0] * PLAIN.batch
    assert float(change.std()) == pytest.approx(1.0, rel=0.03)
    assert abs(float(change.mean())) < 0.03


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(*[st.floats(-100, 100, width=32)] * 3), min_size=1, max_size=6),
    extra=st.tuples(*[st.floats(-1000, 1000, width=32)] * 3),
    clip=st.floats(0.1, 10),
)
def test_one_more_example_changes_a_step_by_no_more_than_the_clip(rows, extra, clip):
    mechanism = DPSGD(noise=0.0, clip=clip, rate=1.0, mean_noise=0.0)
    learner, steps = learner_of(mechanism), []
    for examples in (rows, [*rows, extra]):
        data = block([[a, b] for a, b, _ in examples], [y for _, _, y in examples])
        steps.append(learner.train(torch.tensor([[0.3, -0.2]]), data, Key(0, 1))[0])
    assert float((steps[0] - steps[1]).norm()) * PLAIN.batch <= clip * (1 + 1e-4) + 1e-4


@pytest.mark.parametrize("unit", ["client", "nbafl"])
def test_whole_update_stays_within_the_clip(unit):
    mechanism = NoisyUpdate(1e-9, 0.7) if unit == "client" else NbAFL(1e9, 0.01, 0.7)
    trained = learner_of(mechanism).train(torch.zeros(1, 2), block([[30, 40]], [5]), Key(0, 1))
    assert float(trained.norm()) == pytest.approx(0.7, abs=1e-5)
    assert trained[0].tolist() == pytest.approx([0.42, 0.56], abs=1e-5)


def test_clipped_vectors_have_at_most_the_norm():
    found = clipped(torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.3, 0.4]]), 1.0)
    assert found.flatten().tolist() == pytest.approx([0.6, 0.8, 0, 0, 0.3, 0.4])


def update_of(examples: int, epochs: int = 1, rows: torch.Tensor | None = None) -> LocalUpdate:
    """Return a local update on `examples` examples, or on some of them."""
    own = examples if rows is None else len(rows)
    x, y = torch.ones(own, 2), torch.ones(own)
    rates = [0.1] * epochs
    return LocalUpdate(
        x, y, None, weighted_loss, None, 0.0, rates, Optimizer(), None, examples, rows
    )


def test_nbafl_noise_equals_the_papers_formula():
    """c = sqrt(2 ln 125) = 3.1075; sigma = c 2C / (n epsilon) = 3.1075 * 2 / (100 * 10)."""
    mechanism = NbAFL(epsilon=10.0, delta=0.01, clip=1.0)
    assert mechanism.deviation(update_of(100)) == pytest.approx(0.0062150, rel=1e-4)
    assert mechanism.release(update_of(100)) == (pytest.approx(0.0031075, rel=1e-4), 1, 1)


# ---- sampling


def test_poisson_samples_have_the_rate_and_are_independent():
    mechanism = DPSGD(noise=0.0, clip=1.0, rate=0.2, mean_noise=0.0)
    batches = list(mechanism._batches(update_of(10, epochs=400), SeededDraws(Key(7))))
    assert len(batches) == 2000  # 400 epochs of 1 / 0.2 steps
    seen = np.zeros((2000, 10))
    for step, (_, rows) in enumerate(batches):
        seen[step, rows.numpy()] = 1
    error = math.sqrt(0.2 * 0.8 / 2000)
    assert np.abs(seen.mean(0) - 0.2).max() < 4 * error
    assert float(seen.sum(1).var()) == pytest.approx(10 * 0.2 * 0.8, rel=0.1)
    off_diagonal = np.corrcoef(seen.T)[~np.eye(10, dtype=bool)]
    assert np.abs(off_diagonal).max() < 4 / math.sqrt(2000)


def test_sample_does_not_depend_on_the_cluster_that_is_trained():
    mechanism = DPSGD(noise=0.0, clip=1.0, rate=0.3, mean_noise=0.0)
    odd = torch.arange(1, 20, 2)
    every, half = (
        list(mechanism._batches(update_of(20, 50, rows), SeededDraws(Key(7))))
        for rows in (None, odd)
    )
    for (_, all_rows), (_, own) in zip(every, half, strict=True):
        assert odd[own].tolist() == [row for row in all_rows.tolist() if row % 2]


# ---- equal to plain training


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_without_noise_and_clip_it_is_plain_training_on_the_same_batches(optimizer):
    training = TrainingOptions(optimizer=optimizer, batch=20, epochs=3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 5, generator=generator), torch.randint(3, (20,), generator=generator)
    data = Block([0], 1, [x], [y], 20)
    free = DPSGD(noise=0.0, clip=math.inf, rate=1.0, mean_noise=0.0)

    def trained(mechanism: Mechanism | None) -> torch.Tensor:
        def model() -> nn.Module:
            return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

        learner = Learner(model, training, cross_entropy, mechanism=mechanism)
        return learner.train(learner.draw(Key(1))[None], data, Key(0, 1))

    assert torch.allclose(trained(free), trained(None), atol=1e-5)


def test_fedspd_with_one_cluster_is_fedavg_also_with_noise():
    mechanism = DPSGD.of(noise=1.0, clip=1.0, rate=0.5, epochs=2)
    states = []
    for method, options in (
        (FedSPD, {"selection": "uniform", "align_every": 0, "final_epochs": 0}),
        (FedAvg, {}),
    ):
        plan = Subject(method, 1, options, mechanism).plan()
        runner = BlockRunner(plan)
        runner.begin()
        runner.start_round(1)
        states.append(runner.exchange.model_CKP)
    assert torch.equal(*states)


def test_share_of_the_only_cluster_in_use_costs_nothing():
    """It is 1 for any examples. Client 0 has one cluster of two, client 1 has both."""
    mechanism = DPSGD(noise=1.0, clip=1.0, rate=1.0, mean_noise=1.0)
    learner, own = learner_of(mechanism), (torch.ones(3, 2), torch.zeros(3))
    data = Block([0, 1], 2, [own[0]] * 2, [own[1]] * 2, 3)
    share_CSE = torch.tensor([[[1.0] * 3, [0.0] * 3], [[0.5] * 3, [0.5] * 3]])
    before_CS = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.double)
    share_CS = learner.mean_shares(share_CSE, before_CS, data, Key(0, 1))
    assert share_CS[0].tolist() == [1.0, 0.0]
    assert share_CS[1, 0] != 0.5
    assert dict(learner.effort.releases) == {1: [mechanism.mean_release()]}


# ---- secret draws


def test_secret_draws_repeat_with_the_secret_and_differ_without():
    key = Key(0, 3).of("train", 1)
    first, again = SecretDraws(b"a" * 32, key), SecretDraws(b"a" * 32, key)
    other = SecretDraws(b"b" * 32, key)
    drawn = first.normal(5)
    assert torch.equal(drawn, again.normal(5))
    assert not torch.equal(drawn, first.normal(5))
    assert not torch.equal(drawn, other.normal(5))


def keys_that_torch_seeds_alike(own: Key) -> list[Key]:
    """Return two keys whose numbers have the same last 32 bits, all that torch keeps of a seed."""
    found: dict[int, Key] = {}
    for i in range(400_000):
        key = own.of(i)
        if (other := found.setdefault(key.number() & 0xFFFFFFFF, key)) is not key:
            return [other, key]
    raise AssertionError("no two keys alike")


def test_secret_draws_about_examples_have_more_than_the_32_bits_of_a_seed():
    """So many can be tried, and with the seed, all draws shift where an example is missing."""
    source = NoiseSource()
    for secret, is_alike in ((None, True), (b"a" * 32, False)):
        source.secret = secret
        drawn, dropped = [], []
        for key in keys_that_torch_seeds_alike(source.own_key(Key(0, 1))):
            drawn.append(torch.rand(8, generator=key.torch()))
            with keyed_randomness(key, torch.device("cpu")):
                dropped.append(torch.rand(8))
            assert torch.equal(drawn[-1], dropped[-1])
        assert torch.equal(*drawn) == is_alike
    uniform = torch.rand(40_000, generator=source.own_key(Key(0, 1)).torch())
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(uniform.std()) == pytest.approx(12**-0.5, abs=0.01)


def test_mechanism_can_travel_to_the_actor_of_a_cluster():
    mechanism = DPSGD.of(noise=1.0, clip=1.0, rate=0.5, epochs=2)
    mechanism.source.secret = b"a" * 32
    copied = copy.deepcopy(mechanism)  # Ray packs and unpacks it
    assert copied == mechanism
    assert copied.source.take_name() == mechanism.source.take_name()


def test_secret_draws_are_uniform_and_normal():
    draws = SecretDraws(b"secret", Key(0))
    uniform, normal = draws.uniform(40_000), draws.normal(40_000)
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.01)
    assert 0 < float(uniform.min()) < 0.001 < 0.999 < float(uniform.max()) < 1
    assert float(normal.mean()) == pytest.approx(0, abs=0.02)
    assert float(normal.std()) == pytest.approx(1, abs=0.02)
    assert float((normal.abs() > 1.96).double().mean()) == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize("byte", [b"\0", b"\xff"])
def test_secret_draws_of_all_zeros_or_ones_are_finite_and_far_out(monkeypatch, byte):
    """Noise that is not finite would ruin the model that is sent."""

    class Stream:
        def digest(self, size: int) -> bytes:
            return byte * size

    monkeypatch.setattr(randomness.hashlib, "shake_256", lambda seed: Stream())
    draws = SecretDraws(b"secret", Key(0))
    assert 0 < float(draws.uniform(1)) < 1
    assert float(draws.normal(1).abs()) < 10


def test_secret_normal_draws_reach_as_far_on_both_sides(monkeypatch):
    """64 bits: the largest number is 9.1 deviations away, the next ones have one bit more."""

    class Stream:
        def digest(self, size: int) -> bytes:
            return b"".join(bits.to_bytes(8, "little") for bits in (0, 1, 2, 3, 2**64 - 1))

    monkeypatch.setattr(randomness.hashlib, "shake_256", lambda seed: Stream())
    drawn = SecretDraws(b"secret", Key(0)).normal(5).tolist()
    assert drawn[0] == -drawn[1] == pytest.approx(-9.1, abs=0.1)
    assert drawn[2] == -drawn[3] == pytest.approx(norm.ppf(1.5 * 2.0**-64))
    assert drawn[4] == 0


def test_secret_noise_follows_from_how_the_update_descends():
    """With the same noise, two updates of one model would tell gradients of their later steps."""
    mechanism = DPSGD(noise=1.0, clip=1.0, rate=1.0, mean_noise=0.0)
    mechanism.source.secret = b"a" * 32
    learner, data = learner_of(mechanism), block([[3, 4]], [1])

    def step(rate: float = 1.0, **options: object) -> torch.Tensor:
        """Return the first step, whose gradient is the same whatever the options are."""
        trained = learner.train(torch.zeros(1, 2), data, Key(0, 1), rates=[rate], **options)
        return trained[0] / rate

    first = step()
    assert torch.equal(first, step())
    for other in (
        step(rate=0.5),
        step(momentum=0.9),
        step(objective=negative_log_likelihood_of_one),
    ):
        assert not torch.allclose(first, other, atol=1e-2)


def negative_log_likelihood_of_one(
    loss_B: torch.Tensor, weight_B: torch.Tensor | None
) -> torch.Tensor:
    return weighted_loss(loss_B, weight_B)
