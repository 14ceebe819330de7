"""Local training: numbers worked by hand, torch.optim.SGD as the reference, draws by client.

Shapes: C clients, S models, P parameters of a model, E examples.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions, cross_entropy, squared_error

KEY = Key(3, round=2)


def block(
    x: list[Tensor], y: list[Tensor], clients: list[int] | None = None, network: int = 10
) -> Block:
    return Block(clients or range(len(x)), network, x, y, max(len(own) for own in y))


def slope(training: TrainingOptions) -> Learner:
    """y = w x with the loss (w x - y)^2 / 2: one parameter."""
    return Learner(
        lambda: nn.Linear(1, 1, bias=False), training, squared_error, dtype=torch.float64
    )


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


ONE, TWO = (
    column(1.0),
    block([column(1.0, 2.0)], [column(0.0, 0.0)]),
)  # at w the mean gradient is (1 + 4) / 2 w = 2.5 w


def test_momentum_and_weight_decay_equal_numbers_worked_by_hand():
    """w = 1: g = 2.5 + 0.2, v = 2.7, w = 0.73.

    Then g = 2.7 * 0.73 = 1.971, v = 1.35 + 1.971 = 3.321, w = 0.3979.
    """
    learner = slope(TrainingOptions(lr=0.1, momentum=0.5, weight_decay=0.2))
    assert learner.train(ONE, TWO, KEY, rates=[0.1]).item() == pytest.approx(0.73, abs=1e-15)
    assert learner.train(ONE, TWO, KEY, rates=[0.1, 0.1]).item() == pytest.approx(0.3979, abs=1e-15)


def test_local_update_starts_without_momentum():
    learner = slope(TrainingOptions(lr=0.1, momentum=0.9))
    once = learner.train(ONE, TWO, KEY, rates=[0.1])
    assert once.item() == pytest.approx(0.75)
    assert learner.train(once, TWO, KEY, rates=[0.1]).item() == pytest.approx(0.75 * 0.75)


def test_example_weights_equal_numbers_worked_by_hand():
    """Weights 1 and 0.5: g = (1 * 1 + 0.5 * 4) / 2 = 1.5."""
    trained = slope(TrainingOptions(momentum=0)).train(
        ONE, TWO, KEY, rates=[0.1], weight_CE=torch.tensor([[1.0, 0.5]])
    )
    assert trained.item() == pytest.approx(0.85, abs=1e-15)


def test_proximal_anchor_equals_numbers_worked_by_hand():
    """Anchor 3, pull 0.5: g = 2.5 + 0.5 (1 - 3) = 1.5."""
    trained = slope(TrainingOptions(momentum=0)).train(
        ONE, TWO, KEY, rates=[0.1], anchor_CP=column(3.0), pull_C=torch.tensor([0.5])
    )
    assert trained.item() == pytest.approx(0.85, abs=1e-15)


def test_selected_examples_keep_their_own_weights():
    """Only x = 2, of weight 0.25: g = 0.25 * 4 = 1."""
    only, weight = torch.tensor([[False, True]]), torch.tensor([[9.0, 0.25]])
    trained = slope(TrainingOptions(momentum=0)).train(
        ONE, TWO, KEY, rates=[0.1], only_CE=only, weight_CE=weight
    )
    assert trained.item() == pytest.approx(0.9, abs=1e-15)


def test_default_learning_rates_are_the_papers():
    training = TrainingOptions()
    assert [round(training.rate(t), 10) for t in (0, 1, 5, 6, 10, 11)] == [
        0.05,
        0.05,
        0.05,
        0.04,
        0.04,
        0.032,
    ]
    assert training.rates(1) == [0.05] * 10  # the local epochs of round 1 are doubled
    assert training.rates(2) == [0.05] * 5


def test_train_takes_the_rates_of_the_keys_round_by_default():
    learner = slope(
        TrainingOptions(
            lr=0.1, momentum=0, epochs=1, first_round_factor=3, decay=0.5, decay_every=1
        )
    )
    assert learner.train(ONE, TWO, KEY.at(1)).item() == pytest.approx(0.75**3)
    assert learner.train(ONE, TWO, KEY.at(3)).item() == pytest.approx(1 - 0.025 * 2.5)


class Net(nn.Sequential):
    """3 x 6 x 6 images, 4 classes, no dropout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 5, 3, padding=1),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(45, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 4),
        )


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self[0].requires_grad_(False)


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 6, 6, generator=generator, dtype=torch.float64), torch.randint(
        4, (n,), generator=generator
    )


def same_batches(n: int, size: int, epochs: int, key: Key) -> Iterator[Tensor]:
    generator = key.of("order").torch()
    for _ in range(epochs):
        yield from torch.split(torch.randperm(n, generator=generator), size)


@pytest.mark.parametrize("factory", [Net, Frozen])
def test_many_steps_equal_torch_optim_sgd(factory):
    training = TrainingOptions(lr=0.07, momentum=0.6, weight_decay=0.01, batch=4, epochs=3)
    learner, (x, y) = Learner(factory, training, dtype=torch.float64), images(10)
    start_P = learner.draw(Key(1))
    plain = factory().double()
    plain.load_state_dict(learner.export(start_P))
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.07, momentum=0.6, weight_decay=0.01)
    for batch in same_batches(10, 4, 3, KEY.of("train", 7)):
        optimiser.zero_grad()
        nn.functional.cross_entropy(plain(x[batch]), y[batch]).backward()
        optimiser.step()
    trained = learner.export(learner.train(start_P[None], block([x], [y], [7]), KEY.of("train"))[0])
    assert learner.steps == 9
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-12)


def test_client_without_a_selected_example_keeps_its_model():
    learner, (x, y) = Learner(Net, dtype=torch.float64), images(6)
    model_CP = torch.stack([learner.draw(Key(1)), learner.draw(Key(2))])
    only = torch.tensor([[False] * 6, [True] * 6])
    trained_CP = learner.train(model_CP, block([x, x], [y, y]), KEY, only_CE=only)
    assert torch.equal(trained_CP[0], model_CP[0])
    assert not torch.equal(trained_CP[1], model_CP[1])


def test_batch_of_one_example_uses_the_running_statistics():
    learner, (x, y) = (
        Learner(Net, TrainingOptions(batch=4, epochs=1), dtype=torch.float64),
        images(5),
    )
    trained_P = learner.train(learner.draw(Key(1))[None], block([x], [y]), KEY)[0]
    assert trained_P.isfinite().all()
    assert (
        learner.export(trained_P)["1.num_batches_tracked"] == 1
    )  # of the two batches, only the one of four
    alone_P = learner.train(learner.draw(Key(1))[None], block([x[:1]], [y[:1]]), KEY)[0]
    assert alone_P.isfinite().all()


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(108, 30), nn.Dropout(0.5), nn.Linear(30, 4))


def test_dropout_follows_the_clients_key_in_any_block():
    learner, (x, y) = Learner(Dropping, dtype=torch.float64), images(12)
    three_CP = learner.draw(Key(1)).repeat(3, 1)
    together = learner.train(three_CP, block([x] * 3, [y] * 3, [4, 5, 6]), KEY)
    alone = learner.train(three_CP[:1], block([x], [y], [5]), KEY)
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])


def test_clients_with_one_batch_differ_only_by_dropout():
    """The order within a full batch does not matter, so only dropout makes a difference."""
    (x, y), training = images(12), TrainingOptions(batch=12, epochs=1)
    for factory, are_equal in (
        (Dropping, False),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 4)), True),
    ):
        learner = Learner(factory, training, dtype=torch.float64)
        first_P, second_P = learner.train(
            learner.draw(Key(1)).repeat(2, 1), block([x] * 2, [y] * 2), KEY
        )
        assert torch.allclose(first_P, second_P, rtol=0, atol=1e-12) == are_equal


def test_training_and_evaluation_leave_the_global_generator_alone():
    learner, (x, y) = Learner(Dropping, dtype=torch.float64), images(12)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trained = learner.train(learner.draw(Key(1))[None], block([x], [y]), KEY)
    learner.losses(trained[None], block([x], [y]))
    assert torch.equal(torch.get_rng_state(), before)


def test_losses_equal_those_of_single_examples_and_are_zero_beyond():
    learner, (x, y) = Learner(Net, dtype=torch.float64), images(9)
    model_SP = torch.stack([learner.draw(Key(1)), learner.draw(Key(2))])
    losses_CSE = learner.losses(model_SP.expand(2, 2, -1), block([x, x[:4]], [y, y[:4]]))
    assert losses_CSE.shape == (2, 2, 9)
    for s in range(2):
        plain = Net().double().eval()
        plain.load_state_dict(learner.export(model_SP[s]))
        with torch.no_grad():
            one_by_one = torch.cat(
                [
                    nn.functional.cross_entropy(plain(x[[e]]), y[[e]], reduction="none")
                    for e in range(9)
                ]
            )
        torch.testing.assert_close(losses_CSE[0, s], one_by_one, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            losses_CSE[1, s], torch.cat([one_by_one[:4], torch.zeros(5)]), rtol=0, atol=1e-12
        )


def test_losses_equal_numbers_worked_by_hand():
    assert squared_error(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])).tolist() == [
        (1 + 4) / 2
    ]
    assert squared_error(torch.tensor([3.0]), torch.tensor([1.0])).tolist() == [2.0]
    assert cross_entropy(torch.zeros(1, 4), torch.tensor([2])).item() == pytest.approx(
        torch.tensor(4.0).log().item()
    )


def test_outputs_cover_more_than_one_evaluation_batch():
    learner = slope(TrainingOptions())
    x = torch.arange(1300, dtype=torch.float64)[:, None]
    assert torch.equal(learner.outputs(column(2.0)[0], x), 2 * x)


def test_results_do_not_depend_on_the_number_of_threads():
    (x, y), found = images(64), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            learner = Learner(Net, TrainingOptions(epochs=1), dtype=torch.float64)
            trained = learner.train(learner.draw(Key(1))[None], block([x], [y]), KEY)
            found.append((trained, learner.losses(trained[None], block([x], [y]))))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
