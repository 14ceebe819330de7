"""A module as a flat vector and back: parameters, buffers, integers, ties and memory layouts.

Shapes: P parameters of a model.
"""

import pytest
import torch
from torch import Tensor, nn

from fedspd.core.errors import ConfigError
from fedspd.core.keys import Key
from fedspd.core.learner import Learner


class Everything(nn.Sequential):
    """Convolutions and BatchNorm (2 d and 1 d), dropout, dense layers.

    3 x 8 x 8 images, 4 classes.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 4, (3, 1), groups=2),
            nn.Flatten(),
            nn.LazyLinear(10),
            nn.BatchNorm1d(10),
            nn.Dropout(0.5),
            nn.Linear(10, 4),
        )
        self(torch.zeros(2, 3, 8, 8))  # a lazy layer gets its shape here
        self[1].reset_running_stats()
        self[7].reset_running_stats()


class Tied(nn.Module):
    """An autoencoder whose decoder is its encoder, transposed, and a second name for its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight
        self.decoder.bias = self.encoder.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.relu(self.encoder(x)))


class Sequence(nn.Module):
    """A head on every position of a sequence; the output is their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).mean(1)


class Counting(nn.Module):
    """An integer buffer, a boolean one, and one that every forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("passes", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.last = x.detach().mean(0)
        return x * self.weight


@pytest.mark.parametrize("factory", [Everything, Tied, Counting, lambda: nn.Linear(3, 2)])
def test_store_returns_the_loaded_model(factory):
    learner = Learner(factory)
    drawn_P = learner.draw(Key(1))
    learner.load(learner.draw(Key(2)))
    learner.load(drawn_P)
    assert torch.equal(learner.store(), drawn_P)
    assert drawn_P.shape == (learner.size,)


@pytest.mark.parametrize("factory", [Everything, Tied, Counting])
def test_export_equals_the_state_dict_of_an_equal_module(factory):
    learner = Learner(factory)
    exported = learner.export(learner.draw(Key(1)))
    torch.manual_seed(Key(1).number())
    plain = factory().state_dict()
    assert list(exported) == list(plain)
    for name, tensor in plain.items():
        assert torch.equal(exported[name], tensor)
        assert exported[name].dtype == tensor.dtype
        assert exported[name].is_contiguous()


def test_module_with_the_exported_state_gives_the_same_outputs():
    learner, x = (
        Learner(Everything, dtype=torch.float64),
        torch.randn(7, 3, 8, 8, dtype=torch.float64),
    )
    model_P = learner.draw(Key(1))
    plain = Everything().double().eval()
    plain.load_state_dict(learner.export(model_P))
    torch.testing.assert_close(learner.outputs(model_P, x), plain(x), rtol=0, atol=1e-12)


def test_vector_has_parameters_first_and_a_tied_one_once():
    assert (Learner(Tied).weights, Learner(Tied).size) == (16 + 4, 16 + 4)
    batch_norms = 2 * (6 + 10)  # a mean and a variance per channel
    counters = 2
    learner = Learner(Everything)
    assert learner.weights == sum(p.numel() for p in Everything().parameters())
    assert learner.size == learner.weights + batch_norms + counters


def test_vector_has_batch_norm_statistics_and_counter():
    learner = Learner(
        lambda: nn.BatchNorm1d(1), dtype=torch.float64
    )  # weight, bias | running mean, running variance, counter
    learner.load(torch.tensor([1.0, 0.0, 2.0, 4.0, 7.0], dtype=torch.float64))
    learner.module.train()
    learner.module(
        torch.tensor([[10.0], [14.0]], dtype=torch.float64)
    )  # mean 12, unbiased variance 8, torch's momentum 0.1
    torch.testing.assert_close(
        learner.store(),
        torch.tensor([1.0, 0.0, 0.9 * 2 + 0.1 * 12, 0.9 * 4 + 0.1 * 8, 8.0], dtype=torch.float64),
    )


def test_load_rounds_an_averaged_counter():
    learner = Learner(lambda: nn.BatchNorm1d(1))
    learner.load(torch.tensor([1.0, 0.0, 0.0, 1.0, 6.75]))
    assert learner.module.num_batches_tracked.dtype == torch.long
    assert learner.module.num_batches_tracked == 7


def test_store_finds_a_buffer_that_the_module_replaced():
    learner = Learner(Counting)
    fresh_P = learner.draw(Key(1))  # weight | passes, mask (2), last
    learner.load(fresh_P)
    learner.module(torch.tensor([[5.0]]))
    assert learner.store().tolist() == [1.0, 4.0, 1.0, 0.0, 5.0]
    learner.load(fresh_P)
    assert learner.module.last == 0.0
    assert learner.store().tolist() == [1.0, 3.0, 1.0, 0.0, 0.0]


def test_load_discards_a_buffer_replaced_in_an_evaluation():
    learner = Learner(Counting)
    fresh_P = learner.draw(Key(1))
    learner.outputs(fresh_P, torch.tensor([[5.0]]))
    learner.load(fresh_P)
    assert torch.equal(learner.store(), fresh_P)


def test_draw_depends_on_its_key_alone_and_leaves_the_global_generator_alone():
    learner = Learner(Everything)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    drawn_P = learner.draw(Key(1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(learner.draw(Key(1)), drawn_P)
    assert not torch.equal(learner.draw(Key(2)), drawn_P)


def test_draw_does_not_depend_on_earlier_training():
    learner = Learner(Everything)
    drawn_P = learner.draw(Key(1))
    learner.module.train()
    learner.module(torch.randn(5, 3, 8, 8))
    assert torch.equal(learner.draw(Key(1)), drawn_P)


def test_features_of_a_sequence_are_the_mean_over_its_positions():
    learner = Learner(Sequence)
    x = torch.tensor([[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.0], [4.0, 2.0]]])
    assert learner.features(learner.draw(Key(1)), x).tolist() == [[2.0, 4.0], [2.0, 1.0]]


@pytest.mark.parametrize("change", ["frozen", "tied"])
def test_head_whose_parameters_do_not_stand_together_has_no_cut(change):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if change == "frozen":
        for layer in module:  # the biases stand together behind both weights
            layer.bias.requires_grad_(False)
    else:
        module[1].weight = module[0].weight
    with pytest.raises(ConfigError, match="are tied to another layer or partly frozen"):
        _ = Learner(lambda: module).cut
