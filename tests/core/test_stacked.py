"""The clients of a block together, against the loop: the same in float64 to 1e-12.

And the same bits, in float32 too, whichever clients share a block.

Shapes: C clients, S models or heads per client, P parameters of a model, E examples.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedspd.core.block import Block
from fedspd.core.heads import negative_log_likelihood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions, cross_entropy, squared_error
from fedspd.core.stacked import MOST_PARAMETERS, padded, plan_steps
from fedspd.models import MLP, CifarCNN, Embedding, Linear, PaperCNN
from fedspd.models.dropout import Dropout

KEY = Key(3, round=2)
COUNTS = [9, 9, 4, 8, 1, 0, 13]  # with batches of 4: full ones, a last one of one, and none
WIDTH = max(COUNTS)
TRAINING = TrainingOptions(batch=4, epochs=3, weight_decay=0.01)
EXACT = {"rtol": 0.0, "atol": 1e-12}


class FixedDropout(nn.Module):
    """Dropout whose mask is the same in every step, so that loop and stack can be compared."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draw_mask(x.shape, x.dtype, None) if self.training else x

    def draw_mask(self, shape: Any, dtype: torch.dtype, generator: object) -> Tensor:
        pattern = torch.arange(shape[-1], dtype=dtype) % 3
        return pattern.expand(shape).clone()


def between(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(5, 6), *deepcopy(layers), nn.Linear(6, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP((5,), 3, hidden=7),
    "linear": lambda: Linear((5,), 3),
    "one layer": lambda: nn.Linear(5, 3),
    "no bias": lambda: nn.Sequential(
        nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False)
    ),
    "deep": between(nn.ReLU(), nn.Sequential(nn.Linear(6, 6), nn.Identity()), nn.ReLU()),
    "dropout": between(nn.ReLU(), FixedDropout()),
    "tanh, then relu": between(nn.Tanh(), nn.ReLU()),
    "elu": between(nn.ELU()),
    "gelu": between(nn.GELU()),
    "hardswish": between(nn.Hardswish()),
    "leaky relu": between(nn.LeakyReLU()),
    "mish": between(nn.Mish()),
    "relu6": between(nn.ReLU6()),
    "selu": between(nn.SELU()),
    "sigmoid": between(nn.Sigmoid()),
    "silu": between(nn.SiLU()),
    "softplus": between(nn.Softplus()),
    "hardtanh": between(nn.Hardtanh()),
}
REGRESSIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one value": (lambda: MLP((5,), 1, hidden=4).append(nn.Flatten(0)), ()),
    "two values": (lambda: nn.Linear(5, 2), (2,)),
}


def examples(
    counts: list[int] = COUNTS,
    shape: tuple[int, ...] = (5,),
    targets: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Block:
    generator = KEY.of("examples").torch()
    x = [torch.randn(count, *shape, generator=generator, dtype=dtype) for count in counts]
    if targets is None:
        y = [torch.randint(3, (count,), generator=generator) for count in counts]
    else:
        y = [torch.randn(count, *targets, generator=generator, dtype=dtype) for count in counts]
    return Block(range(len(counts)), len(counts), x, y, max(counts))


def table(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, generator=KEY.of("table").torch(), dtype=dtype)


def twins(
    factory: Callable[[], nn.Module],
    training: TrainingOptions = TRAINING,
    loss: Callable[..., Tensor] = cross_entropy,
) -> tuple[Learner, Learner]:
    """One learner that loops, and one that trains its clients together."""
    loop, stacked = (Learner(factory, training, loss, dtype=torch.float64) for _ in range(2))
    loop.stacked_trainer = None
    assert stacked.stacked_trainer is not None
    stacked.stacked_trainer.group_size = 3  # so that there are several groups
    return loop, stacked


def first_models(learner: Learner, clients: int = len(COUNTS)) -> Tensor:
    return torch.stack([learner.draw(KEY.of("model", c)) for c in range(clients)])


def assert_trained_alike(loop: Learner, stacked: Learner, data: Block, **options: Any) -> None:
    model_CP = first_models(loop, len(data))
    before = loop.steps, stacked.steps
    expected, found = (learner.train(model_CP, data, KEY, **options) for learner in (loop, stacked))
    assert not torch.allclose(expected, model_CP)
    torch.testing.assert_close(found, expected, **EXACT)
    assert loop.steps - before[0] == stacked.steps - before[1] > 0


@pytest.mark.parametrize("name", MODELS)
def test_models_of_known_layers_train_as_in_the_loop(name):
    loop, stacked = twins(MODELS[name])
    data = examples()
    assert_trained_alike(loop, stacked, data)


@pytest.mark.parametrize("name", REGRESSIONS)
@pytest.mark.parametrize("S", [1, 2])
def test_regressions_train_as_in_the_loop(name, S):
    factory, targets = REGRESSIONS[name]
    loop, stacked = twins(factory, loss=squared_error)
    data = examples(targets=targets)
    assert_trained_alike(loop, stacked, data)
    assert_trained_alike(loop, stacked, data, weight_CE=table(len(data), WIDTH))
    assert_split_alike(loop, stacked, data, S)


@pytest.mark.parametrize(
    "options",
    [
        {"weight_CE": table(len(COUNTS), WIDTH)},
        {"only_CE": table(len(COUNTS), WIDTH) > 0.6},
        {"pull_C": table(len(COUNTS)) * 2},
        {"rates": [0.1, 0.05]},
        {"momentum": 0.0},
        {"momentum": 0.9},
        {"factor_W": table(7 * 5 + 7 + 3 * 7 + 3)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_training_do_as_in_the_loop(options):
    loop, stacked = twins(MODELS["mlp"])
    if "pull_C" in options:
        options = {**options, "anchor_CP": first_models(loop).flip(0)}
    assert_trained_alike(loop, stacked, examples(), **options)


@pytest.mark.parametrize("batch", [1, 5, 10, 100])
def test_batches_of_any_size_train_as_in_the_loop(batch):
    training = TrainingOptions(batch=batch, epochs=2)
    loop, stacked = twins(MODELS["mlp"], training)
    assert_trained_alike(loop, stacked, examples([10, 23, 1, 47]))


def test_examples_of_several_axes_train_as_in_the_loop():
    """A dense layer over the last axis, before the axes are made one."""

    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))

    loop, stacked = twins(factory)
    assert_trained_alike(loop, stacked, examples(shape=(3, 5)))


def words(counts: list[int] = COUNTS, dtype: torch.dtype = torch.float64) -> Block:
    """Examples of three words each, of which the first is in every example, often twice."""
    data, generator = examples(counts, dtype=dtype), KEY.of("words").torch()
    x = [torch.randint(11, (count, 3), generator=generator).to(dtype) for count in counts]
    for own in x:
        own[:, 0] = 4
    return replace(data, x=x)


def of_words(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        *(Embedding(11, 5), *deepcopy(layers), nn.Flatten()), nn.Linear(15, 3)
    )


@pytest.mark.parametrize("layers", [(), (nn.ReLU(), FixedDropout())], ids=["plain", "dropout"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_embeddings_train_as_in_the_loop(layers, momentum):
    loop, stacked = twins(of_words(*layers))
    assert_trained_alike(loop, stacked, words(), momentum=momentum)
    assert_trained_alike(loop, stacked, words(), weight_CE=table(len(COUNTS), WIDTH))
    assert_split_alike(loop, stacked, words(), 2)


@pytest.mark.parametrize("optimizer", [{"optimizer": "adamw"}, {"clip": 0.1}], ids=str)
def test_embeddings_train_as_in_the_loop_with_other_optimisers(optimizer):
    training = TrainingOptions(batch=4, epochs=2, **optimizer)
    assert_trained_alike(*twins(of_words(), training), words())


def test_frozen_embedding_stays_and_the_rest_trains_as_in_the_loop():
    def factory() -> nn.Module:
        module = of_words()()
        module[0].weight.requires_grad_(False)
        return module

    assert_trained_alike(*twins(factory), words())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_embeddings_have_the_same_bits_in_any_block(dtype):
    learner = Learner(of_words(nn.Tanh()), TrainingOptions(batch=10, epochs=2), dtype=dtype)
    data = words([40, 7, 23, 0, 12, 40, 3, 1], dtype)
    model_CP = first_models(learner, len(data))
    expected = learner.train(model_CP, data, KEY)
    for rows in ([6, 0, 3], [7, 5, 4, 2, 1], [5], [7]):
        assert torch.equal(learner.train(model_CP[rows], data.select(rows), KEY), expected[rows])


def test_frozen_parameters_stay_and_the_others_train_as_in_the_loop():
    def factory() -> nn.Module:
        module = MLP((5,), 3, hidden=6)
        module[1].weight.requires_grad_(False)
        return module

    loop, stacked = twins(factory)
    assert loop.weights < loop.size
    assert_trained_alike(loop, stacked, examples())


def assert_split_alike(loop: Learner, stacked: Learner, data: Block, S: int) -> None:
    one, together = loop.split(S), stacked.split(S)
    one.stacked_trainer = None
    assert together.stacked_trainer is not None
    generator = KEY.of("heads").torch()
    model_CA = torch.randn(len(data), one.size, generator=generator, dtype=torch.float64) * 0.3
    weight_CES = table(len(data), WIDTH, S).softmax(2)
    for options in ({}, {"objective": negative_log_likelihood}):
        expected, found = (
            learner.train(model_CA, data, KEY, weight_CE=weight_CES, **options)
            for learner in (one, together)
        )
        torch.testing.assert_close(found, expected, **EXACT)
        assert torch.equal(found[:, one.weights :], model_CA[:, one.weights :])  # the prior


@pytest.mark.parametrize("S", [1, 2, 4])
@pytest.mark.parametrize("name", ["mlp", "one layer", "no bias", "dropout"])
def test_heads_train_as_in_the_loop(name, S):
    loop, stacked = twins(MODELS[name])
    assert_split_alike(loop, stacked, examples(), S)


def test_a_head_in_the_middle_trains_as_in_the_loop():
    loop, stacked = twins(
        lambda: nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3), nn.Flatten())
    )
    loop.head = stacked.head = "0"
    assert_split_alike(loop, stacked, examples(), 2)


# ---- the same bits in any block


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("inputs", "hidden", "activation"),
    [(64, 64, nn.ReLU), (33, 7, nn.GELU), (3, 1, nn.Softplus), (784, 10, nn.Tanh)],
)
def test_results_have_the_same_bits_in_any_block(inputs, hidden, activation, dtype):
    def factory() -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(inputs, hidden), activation(), nn.Dropout(0.25)), nn.Linear(hidden, 3)
        )

    learner = Learner(factory, TrainingOptions(batch=10, epochs=2, lr=0.01), dtype=dtype)
    data = examples([40, 7, 23, 0, 12, 40, 3, 1], (inputs,), dtype=dtype)
    split = learner.split(2)
    model_CP = first_models(learner, len(data))
    model_CA = split.join(
        model_CP,
        table(len(data), 2, split.head_size, dtype=dtype) / 9,
        torch.zeros(len(data), 3, dtype=dtype),
    )
    weight_CES = table(len(data), 40, 2, dtype=dtype)

    def results(rows: list[int]) -> list[Tensor]:
        own = data.select(rows)
        return [
            learner.train(model_CP[rows], own, KEY, only_CE=weight_CES[rows, :, 0] > 0.3),
            learner.losses(torch.stack([model_CP, model_CP + 1], 1)[rows], own),
            split.train(model_CA[rows], own, KEY, weight_CE=weight_CES[rows]),
            split.cluster_losses(model_CA[rows], own),
        ]

    expected = results(list(range(len(data))))
    for rows in ([6, 0, 3], [7, 5, 4, 2, 1], [5], [7], [0, 5]):
        for all_clients, some in zip(expected, results(rows), strict=True):
            assert torch.isfinite(some).all()
            assert torch.equal(some, all_clients[rows])


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adamw"}, {"clip": 0.1}], ids=str)
def test_local_updates_leave_no_trace_in_later_ones(optimizer):
    """Models that are lost, other examples, other momentum: the memory they used serves again."""
    training = TrainingOptions(batch=10, epochs=2, **optimizer)
    used, fresh = (Learner(MODELS["mlp"], training) for _ in range(2))
    data = examples([23, 7], dtype=torch.float32)
    model_CP = first_models(used, 2)
    used.train(torch.full_like(model_CP, torch.nan), data, KEY)
    used.train(model_CP, examples([9, 4], dtype=torch.float32), KEY)
    used.train(model_CP, data, KEY, momentum=0.1)
    for rows in ([1], [0, 1], [0]):
        own = model_CP[rows], data.select(rows), KEY
        found = used.train(*own)
        assert torch.equal(used.train(*own), found)
        assert torch.equal(fresh.train(*own), found)


def test_workspace_of_a_large_group_is_not_kept():
    learner = Learner(MODELS["mlp"], TrainingOptions(batch=50_000, epochs=1))
    assert learner.stacked_trainer is not None
    for count, is_kept in ((50, True), (50_000, False), (50, True)):
        learner.train(first_models(learner, 1), examples([count], dtype=torch.float32), KEY)
        assert (learner.stacked_trainer._kept is not None) == is_kept


def test_dropout_draws_follow_from_the_client_and_have_the_layers_rate():
    def factory() -> nn.Module:
        return nn.Sequential(Dropout(0.75), nn.Linear(400, 1, bias=False), nn.Flatten(0))

    training = TrainingOptions(batch=1, epochs=1, lr=1.0, momentum=0.0)
    learner = Learner(factory, training, squared_error)
    x = torch.ones(1, 400)
    data = Block(range(2), 2, [x, x], [torch.ones(1), torch.ones(1)], 1)
    change_CP = learner.train(torch.zeros(2, 400), data, KEY)  # of kept inputs: 1 / (1 - p)
    assert set(change_CP.unique().tolist()) == {0.0, 4.0}
    assert 0.15 < float((change_CP > 0).float().mean()) < 0.35
    assert not torch.equal(change_CP[0], change_CP[1])
    assert torch.equal(learner.predict(torch.ones(1, 400), [x])[0], torch.tensor([400.0]))


# ---- which models, which steps


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def tied() -> nn.Module:
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    return nn.Sequential(first, second)


def hooked() -> nn.Module:
    module = nn.Linear(5, 3)
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "factory",
    [
        lambda: PaperCNN((1, 8, 8), 3),
        lambda: CifarCNN((3, 8, 8), 3, small=True),
        between(nn.BatchNorm1d(6)),
        between(nn.Softmax(1)),
        lambda: Doubled(5, 3),
        tied,
        hooked,
        lambda: nn.Sequential(nn.Linear(5, 3), nn.Flatten(0)),
        lambda: nn.Sequential(nn.Linear(5, 3), Embedding(4, 2), nn.Flatten(), nn.Linear(6, 3)),
        lambda: nn.Linear(1000, 1 + MOST_PARAMETERS // 1000),
    ],
    ids=["cnn", "cifar", "norm", "softmax", "own layer", "tied", "hook", "flat", "words", "large"],
)
def test_other_models_stay_in_the_loop(factory):
    assert Learner(factory).stacked_trainer is None


def test_batches_are_filled_up_to_a_size_that_follows_from_their_own():
    assert [padded(size, 50) for size in (1, 8, 9, 30, 33, 50, 90)] == [8, 8, 16, 32, 50, 50, 50]
    assert [padded(size, 4) for size in (1, 3, 4)] == [4, 4, 4]


def test_steps_of_an_epoch_are_planned_by_examples():
    """Batches of 10: three clients have a full one, then two have 2 and 1 left, filled up to 8."""
    steps = plan_steps([12, 11, 10], 10)
    assert [(s.rows, s.columns, s.clients) for s in steps] == [
        (slice(0, 3), slice(0, 10), 3),
        (slice(0, 2), slice(10, 18), 2),
    ]
    (alone,) = plan_steps([5], 10)
    assert alone.rows == slice(0, 2, 1)  # with the spare row
    assert alone.clients == 1
