"""Clients together, as on a GPU, against the loop that a CPU runs: the same in float64 to 1e-9.

Shapes: C clients, P parameters of a model, E examples.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fedspd.config import load
from fedspd.core.block import Block
from fedspd.core.client_dropout import has_other_random_layers
from fedspd.core.errors import ConfigError
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions, cross_entropy, squared_error
from fedspd.core.vmapped import VmapTrainer
from fedspd.experiment.build import build_experiment as experiment
from fedspd.models import ModelOptions, build_model
from fedspd.models.dropout import Dropout

KEY = Key(3, round=2)
COUNTS = [
    9,
    9,
    4,
    8,
]  # with batches of 4: full ones, last ones of one example, and clients that are done before others
SGD = TrainingOptions(batch=4, epochs=2, weight_decay=0.01, decay_every=1)
DEEP = "mobilenet-v2"
KINDS = {
    "linear": (1, 4, 4),
    "mlp": (1, 4, 4),
    "cnn": (1, 8, 8),
    "cifar-cnn": (3, 8, 8),
    DEEP: (3, 16, 16),
}


def without_dropout(factory: Callable[[], nn.Module]) -> nn.Module:
    module = factory()
    for layer in module.modules():
        for name, child in layer.named_children():
            if isinstance(child, Dropout | nn.Dropout):
                setattr(layer, name, nn.Identity())
    return module


def examples(shape: tuple[int, ...], counts: list[int], classes: int = 3) -> Block:
    generator = KEY.of("examples").torch()
    x = [torch.randn(count, *shape, generator=generator, dtype=torch.float64) for count in counts]
    y = [torch.randint(classes, (count,), generator=generator) for count in counts]
    return Block(range(len(counts)), len(counts), x, y, max(counts))


def twins(
    factory: Callable[[], nn.Module],
    training: TrainingOptions = SGD,
    loss: Callable[..., Tensor] = cross_entropy,
) -> tuple[Learner, Learner]:
    """One learner that loops, and one that does as it would on a GPU."""
    alone, together = (
        Learner(partial(without_dropout, factory), training, loss, dtype=torch.float64)
        for _ in range(2)
    )
    alone.stacked_trainer = together.stacked_trainer = None
    together.vmap_trainer = VmapTrainer(together)
    return alone, together


def first_models(learner: Learner, clients: int) -> Tensor:
    return torch.stack([learner.draw(KEY.of("model", c)) for c in range(clients)])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind == DEEP else kind for kind in KINDS]
)
def test_every_kind_of_model_trains_as_in_the_loop(kind):
    deep = (
        kind == DEEP
    )  # many steps of its BatchNorm layers on a few pixels would make rounding errors large
    shape, counts, training = (
        KINDS[kind],
        [5, 4] if deep else COUNTS,
        TrainingOptions(lr=0.001, batch=4, epochs=1) if deep else SGD,
    )
    alone, together = twins(
        partial(build_model, ModelOptions(name=kind, small=kind == "cifar-cnn"), shape, 3), training
    )
    data, model_CP = examples(shape, counts), first_models(alone, len(counts))
    expected_CP, found_CP = (learner.train(model_CP, data, KEY) for learner in (alone, together))
    assert not torch.equal(expected_CP, model_CP)
    torch.testing.assert_close(found_CP, expected_CP, rtol=0, atol=1e-9)
    assert together.steps == alone.steps
    expected, found = (learner.losses(found_CP[:, None], data) for learner in (alone, together))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_batchnorm_has_the_statistics_of_each_client():
    """After one step on 10s, the running mean is 0.9 * 0 + 0.1 * 10 = 1; after 20s it is 2."""
    _, together = twins(
        lambda: nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)),
        TrainingOptions(batch=4, epochs=1),
    )
    data = Block(
        range(2),
        2,
        [torch.full((4, 1), 10.0), torch.full((4, 1), 20.0)],
        [torch.zeros(4, dtype=torch.long)] * 2,
        4,
    )
    trained_CP = together.train(first_models(together, 2), data, KEY)
    norms = [together.export(model_P) for model_P in trained_CP]
    assert [round(norm["0.running_mean"].item(), 12) for norm in norms] == [1.0, 2.0]
    assert [norm["0.num_batches_tracked"].item() for norm in norms] == [1, 1]


def test_averaged_counter_is_rounded_as_in_the_loop():
    """BatchNorm's counter of 6.75 is 7 when it is loaded, and 8 after one step."""
    factory = partial(nn.Sequential, nn.BatchNorm1d(1), nn.Linear(1, 2))
    training = TrainingOptions(batch=4, epochs=1)
    data = Block(range(1), 1, [torch.ones(4, 1)], [torch.zeros(4, dtype=torch.long)], 4)
    for learner in twins(factory, training):
        model_CP = first_models(learner, 1)
        model_CP[:, -1] = 6.75
        assert learner.train(model_CP, data, KEY)[0, -1].item() == 8


@pytest.mark.parametrize("option", ["only", "weight", "pull", "regression"])
def test_every_training_option_works_as_in_the_loop(option):
    regression = option == "regression"
    factory = partial(build_model, ModelOptions(name="mlp"), (1, 4, 4), 0 if regression else 3)
    alone, together = twins(factory, loss=squared_error if regression else cross_entropy)
    data, model_CP = examples((1, 4, 4), COUNTS), first_models(alone, 4)
    if regression:
        data = Block(data.clients, 4, data.x, [y.double() for y in data.y], data.width)
    generator = KEY.of(option).torch()
    options = {
        "only": {"only_CE": torch.rand(4, data.width, generator=generator) < 0.5},
        "weight": {
            "weight_CE": torch.rand(4, data.width, generator=generator, dtype=torch.float64)
        },
        "pull": {"anchor_CP": model_CP + 1, "pull_C": torch.arange(4.0), "momentum": 0.0},
    }.get(option, {})
    expected_CP, found_CP = (
        learner.train(model_CP, data, KEY, rates=[0.1, 0.01], **options)
        for learner in (alone, together)
    )
    torch.testing.assert_close(found_CP, expected_CP, rtol=0, atol=1e-9)


def test_frozen_and_tied_parameters_train_as_in_the_loop():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Conv2d(1, 2, 3, padding=1)
            self.frozen.requires_grad_(False)
            self.once = nn.Linear(32, 32)
            self.again = nn.Linear(32, 32)
            self.again.weight = self.once.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.once(self.frozen(x).flatten(1)).tanh())

    alone, together = twins(Tied)
    data, model_CP = examples((1, 4, 4), COUNTS), first_models(alone, 4)
    expected_CP, found_CP = (learner.train(model_CP, data, KEY) for learner in (alone, together))
    torch.testing.assert_close(found_CP, expected_CP, rtol=0, atol=1e-9)
    assert torch.equal(found_CP[:, alone.weights :], model_CP[:, alone.weights :])


def test_dropout_differs_between_clients_and_repeats_itself():
    learner = Learner(
        lambda: nn.Sequential(nn.Flatten(), Dropout(0.5), nn.Linear(16, 3)),
        TrainingOptions(batch=4, epochs=1),
        dtype=torch.float64,
    )
    learner.vmap_trainer = VmapTrainer(learner)
    one = examples((1, 4, 4), [4])
    data = Block(range(2), 2, one.x * 2, one.y * 2, 4)
    model_CP = first_models(learner, 1).repeat(2, 1)
    first_CP, second_CP = (learner.train(model_CP, data, KEY) for _ in range(2))
    assert torch.equal(first_CP, second_CP)
    assert not torch.equal(first_CP[0], first_CP[1])


def with_vmap(*layers: nn.Module) -> Learner:
    """A learner of two dense layers, with others between them, that trains as on a GPU."""
    factory = partial(between, layers)
    learner = Learner(factory, SGD, dtype=torch.float64)
    learner.stacked_trainer, learner.vmap_trainer = None, VmapTrainer(learner)
    return learner


def between(layers: tuple[nn.Module, ...]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), *deepcopy(layers), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "layers",
    [
        (Dropout(0.5),),
        (nn.Dropout(0.3),),
        (nn.Dropout(0.3), nn.ReLU(), Dropout(0.25)),
        (nn.Dropout(0.0), nn.Dropout(0.5, inplace=True)),
        (nn.Dropout(0.5), nn.Dropout(1.0)),
    ],
    ids=["ours", "torch", "two layers", "none, then in place", "all"],
)
def test_dropout_draws_as_in_the_loop_whichever_clients_train_together(layers):
    """Other masks would change the parameters by about 0.01."""
    together = with_vmap(*layers)
    data, model_CP = examples((1, 4, 4), COUNTS), first_models(together, 4)
    found_CP = together.train(model_CP, data, KEY)
    for rows in ([0], [2, 1], [3, 0, 2]):
        own_CP = together.train(model_CP[rows], data.select(rows), KEY)
        torch.testing.assert_close(own_CP, found_CP[rows], rtol=0, atol=1e-12)
    together.vmap_trainer = None
    expected_CP = together.train(model_CP, data, KEY)
    torch.testing.assert_close(found_CP, expected_CP, rtol=0, atol=1e-9)


def test_dropout_layers_are_themselves_again_after_training():
    learner = with_vmap(nn.Dropout(0.5))
    data = examples((1, 4, 4), COUNTS)
    learner.train(first_models(learner, 4), data, KEY)
    (layer,) = [m for m in learner.module.modules() if isinstance(m, nn.Dropout)]
    assert "forward" not in vars(layer)


def test_model_that_draws_by_itself_is_refused_in_a_sentence():
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    learner = with_vmap(Noise())
    data = examples((1, 4, 4), COUNTS)
    with pytest.raises(ConfigError, match="draws random numbers"):
        learner.train(first_models(learner, 4), data, KEY)


@pytest.mark.parametrize("layer", [nn.Dropout1d(0.5), nn.AlphaDropout(0.5), nn.RReLU()])
def test_layers_whose_draws_have_no_mask_train_in_the_loop(layer):
    assert has_other_random_layers(nn.Sequential(nn.Linear(4, 4), layer))
    assert not has_other_random_layers(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU()))


def test_client_without_examples_keeps_its_model():
    _, together = twins(partial(build_model, ModelOptions(name="linear"), (1, 4, 4), 3))
    data, model_CP = examples((1, 4, 4), [4, 4]), first_models(together, 2)
    none = torch.tensor([[True] * 4, [False] * 4])
    trained_CP = together.train(model_CP, data, KEY, only_CE=none)
    assert torch.equal(trained_CP[1], model_CP[1])
    assert not torch.equal(trained_CP[0], model_CP[0])


def test_device_auto_takes_a_gpu_where_there_is_one():
    device = experiment(
        load(None, ["device=auto", "clients=2", "data.examples=10", "topology.kind=ring"])
    ).plan.learner.device
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_learner_on_a_cpu_loops():
    assert (
        Learner(partial(build_model, ModelOptions(name="linear"), (1, 4, 4), 3)).vmap_trainer
        is None
    )
