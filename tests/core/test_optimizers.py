"""AdamW, gradient clipping and schedules: torch as the reference, and all three forms of a step.

Shapes: C clients, P parameters of a model, E examples.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedspd.core.block import Block
from fedspd.core.errors import ConfigError
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.core.sgd import Descent, Optimizer, clip_gradient
from fedspd.core.vmapped import VmapTrainer

KEY = Key(3, round=2)
COUNTS = [9, 9, 4, 8, 1, 13]  # with batches of 4: clients take different numbers of steps
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "clipped adamw": {"optimizer": "adamw", "clip": 0.05},
    "clipped sgd": {"clip": 0.3, "weight_decay": 0.01},
}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def options(name: str, **more: Any) -> TrainingOptions:
    return TrainingOptions(lr=0.03, batch=4, epochs=3, **OPTIONS[name], **more)


def examples(dtype: torch.dtype = torch.float64) -> Block:
    generator = KEY.of("examples").torch()
    x = [3 * torch.randn(count, 5, generator=generator, dtype=dtype) for count in COUNTS]
    y = [torch.randint(3, (count,), generator=generator) for count in COUNTS]
    return Block(range(len(COUNTS)), len(COUNTS), x, y, max(COUNTS))


def learner_of(form: str, training: TrainingOptions) -> Learner:
    learner = Learner(build, training, dtype=torch.float64)
    assert learner.stacked_trainer is not None
    learner.stacked_trainer.group_size = 4
    if form != "stacked":
        learner.stacked_trainer = None
    if form == "vmapped":
        learner.vmap_trainer = VmapTrainer(learner)
    return learner


def first_models(learner: Learner) -> Tensor:
    return torch.stack([learner.draw(KEY.of("model", c)) for c in range(len(COUNTS))])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", ["loop", "stacked", "vmapped"])
def test_many_steps_equal_those_of_torch(form, name):
    training = options(name)
    learner, data = learner_of(form, training), examples()
    model_CP = first_models(learner)
    trained_CP = learner.train(model_CP, data, KEY)
    for c in range(len(COUNTS)):
        expected = train_plainly(learner.as_module(model_CP[c]), data, c, training)
        found = learner.export(trained_CP[c])
        for key, tensor in expected.state_dict().items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-10)


def train_plainly(module: nn.Module, data: Block, c: int, training: TrainingOptions) -> nn.Module:
    decay = training.weight_decay
    if training.optimizer == "adamw":
        optimiser: Any = torch.optim.AdamW(module.parameters(), lr=0.03, weight_decay=decay)
    else:
        optimiser = torch.optim.SGD(module.parameters(), lr=0.03, momentum=0.5, weight_decay=decay)
    generator = KEY.of(c, "order").torch()
    for _ in range(training.epochs):
        for rows in torch.split(torch.randperm(COUNTS[c], generator=generator), 4):
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(data.x[c][rows]), data.y[c][rows]).backward()
            if training.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), training.clip)
            optimiser.step()
    return module


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", ["stacked", "vmapped"])
def test_anchors_and_rate_factors_work_as_in_the_loop(form, name):
    """Half of the parameters stay as they are, and do not count in the norm."""
    results = []
    for learner in (learner_of("loop", options(name)), learner_of(form, options(name))):
        model_CP = first_models(learner)
        factor_W = (torch.arange(learner.weights) % 2).double()
        trained_CP = learner.train(
            model_CP,
            examples(),
            KEY,
            anchor_CP=model_CP.flip(0),
            pull_C=torch.arange(6.0) / 9,
            factor_W=factor_W,
        )
        assert torch.equal(trained_CP[:, factor_W == 0], model_CP[:, factor_W == 0])
        results.append(trained_CP)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_have_the_same_bits_in_any_block(name, dtype):
    learner, data = Learner(build, options(name), dtype=dtype), examples(dtype)
    assert learner.stacked_trainer is not None
    model_CP = first_models(learner)
    expected_CP = learner.train(model_CP, data, KEY)
    for rows in ([0], [5, 0], [4, 3, 2, 1], [2], [4]):
        assert torch.equal(learner.train(model_CP[rows], data.select(rows), KEY), expected_CP[rows])


def test_memory_of_the_optimiser_is_empty_at_the_start_of_every_local_update():
    """The first step of AdamW is lr in the direction of the gradient's sign."""
    learner = Learner(lambda: nn.Linear(1, 2), TrainingOptions(optimizer="adamw", batch=4))
    x, y = [torch.ones(4, 1)], [torch.zeros(4, dtype=torch.long)]
    data, model_CP = Block([0], 1, x, y, 4), torch.zeros(1, 4)
    for _ in range(2):
        trained_CP = learner.train(model_CP, data, KEY, rates=[0.1])
        torch.testing.assert_close(
            trained_CP - model_CP, torch.tensor([[0.1, -0.1, 0.1, -0.1]]), rtol=1e-4, atol=1e-6
        )
        model_CP = trained_CP


def test_clipping_leaves_out_what_is_not_trained():
    gradient = [torch.tensor([[3.0, 100.0], [0.3, 100.0]])]
    clip_gradient(gradient, [torch.tensor([0.1, 0.0])], 1.5)
    torch.testing.assert_close(gradient[0][:, 0], torch.tensor([1.5, 0.3]), rtol=1e-4, atol=0.0)


def test_clipping_scales_a_long_gradient_and_leaves_a_short_one():
    gradient = [torch.tensor([[3.0], [0.3]]), torch.tensor([[4.0], [0.4]])]
    clip_gradient(gradient, [0.1, 0.1], 1.0)
    torch.testing.assert_close(torch.cat(gradient, 1), torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


def test_schedules_follow_the_numbers_worked_by_hand():
    cosine = TrainingOptions(lr=0.2, schedule="cosine").over(4)
    expected = [0.2, 0.1 * (1 + math.sqrt(0.5)), 0.1, 0.1 * (1 - math.sqrt(0.5)), 0.0, 0.0]
    assert [cosine.rate(t) for t in range(1, 7)] == pytest.approx(expected)
    constant = TrainingOptions(schedule="constant", first_round_factor=1, epochs=2)
    assert constant.rates(150) == [0.05, 0.05]
    assert TrainingOptions().over(200).rate(150) == pytest.approx(0.05 * 0.8**29)


def test_default_learning_rate_is_that_of_the_optimizer():
    assert TrainingOptions().over(3).lr == 0.05
    assert TrainingOptions(optimizer="adamw").over(3).lr == 0.001
    assert TrainingOptions(optimizer="adamw", lr=0.05).first_rate == 0.05


def test_cosine_without_a_number_of_rounds_is_refused():
    with pytest.raises(ConfigError, match="the number of rounds is not known here"):
        TrainingOptions(schedule="cosine").rate(1)


@pytest.mark.parametrize("adds_up", [False, True])
def test_sgd_takes_the_same_steps_whether_or_not_the_gradient_adds_up(adds_up):
    """Gradients 1 and 2 with momentum 0.5 and rate 1: the weight goes to -1, then by -2.5."""
    weights, gradient = torch.zeros(1), torch.zeros(1)
    descent = Descent(Optimizer(momentum=0.5), [weights], [gradient], adds_up)
    seen = []
    for value in (1.0, 2.0):
        descent.expect_gradient()
        gradient += value  # as a backward pass does
        descent.step([1.0], [])
        seen.append(weights.item())
    assert seen == [-1.0, -3.5]
