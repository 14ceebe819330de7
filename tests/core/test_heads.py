"""A model with one head per cluster against plain models, each with a head of its own.

Shapes: C clients, S clusters, P parameters of a model, Q of its head, E examples.
"""

import pytest
import torch
from torch import nn

from fedspd.core.block import Block
from fedspd.core.cut import find_head
from fedspd.core.errors import ConfigError
from fedspd.core.heads import negative_log_likelihood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions, squared_error
from fedspd.models import CifarCNN, PaperCNN

KEY = Key(0, 1)
MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,)),
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "no bias": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 3, bias=False)), (4,)),
    "cnn": (lambda: PaperCNN((1, 16, 16), 3), (1, 16, 16)),
    "batchnorm": (lambda: CifarCNN((3, 16, 16), 3, small=True), (3, 16, 16)),
}


def learner_of(name: str, **options) -> tuple[Learner, Block]:
    factory, shape = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(count, *shape, generator=generator) for count in (5, 1)]
    y = [torch.tensor([0, 2, 1, 2, 0]), torch.tensor([1])]
    return Learner(factory, dtype=torch.float64, **options), Block(range(2), 2, x, y, 5)


def parts(learner: Learner, S: int):
    split = learner.split(S)
    generator = torch.Generator().manual_seed(1)
    model_CP = torch.stack([learner.draw(KEY.of(c)) for c in range(2)])
    offsets_CSQ = torch.randn(2, S, split.head_size, generator=generator, dtype=torch.double)
    prior_CK = torch.randn(2, 3, generator=generator, dtype=torch.double)
    return split, model_CP, offsets_CSQ, prior_CK


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("S", [2, 3])
def test_split_model_gives_the_outputs_of_plain_models_with_shifted_heads(name, S):
    learner, data = learner_of(name)
    split, model_CP, offsets_CSQ, prior_CK = parts(learner, S)
    model_CA = split.join(model_CP, offsets_CSQ, prior_CK)
    output_ES = split.outputs(model_CA[0], data.x[0])
    for s in range(S):
        plain_P = model_CP[0].clone()
        learner.cut.head(plain_P).add_(offsets_CSQ[0, s])
        expected = learner.outputs(plain_P, data.x[0]) + prior_CK[0]
        assert torch.allclose(output_ES[:, s], expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("S", [1, 3])
def test_split_model_separates_into_what_was_joined(name, S):
    learner, _ = learner_of(name)
    split, model_CP, offsets_CSQ, prior_CK = parts(learner, S)
    found_CP, found_CSQ = split.separate(split.join(model_CP, offsets_CSQ, prior_CK))
    assert torch.equal(found_CP, model_CP)
    assert torch.equal(found_CSQ, offsets_CSQ if S > 1 else offsets_CSQ[:, :0])
    body_CB = learner.cut.body(model_CP)
    assert body_CB.shape[1] == learner.size - split.head_size
    assert torch.equal(learner.cut.join(body_CB, learner.cut.head(model_CP)), model_CP)


def test_one_head_without_a_prior_trains_as_the_plain_model_to_the_bit():
    for name in MODELS:
        learner, data = learner_of(name, training=TrainingOptions(batch=2))
        split, model_CP, offsets_CSQ, prior_CK = parts(learner, 1)
        model_CA = split.join(model_CP, offsets_CSQ, torch.zeros_like(prior_CK))
        trained_CP, _ = split.separate(split.train(model_CA, data, KEY))
        assert torch.equal(trained_CP, learner.train(model_CP, data, KEY))


def test_gradient_steps_count_as_those_of_the_plain_learner():
    learner, data = learner_of("mlp", training=TrainingOptions(batch=2, epochs=1))
    split, model_CP, offsets_CSQ, prior_CK = parts(learner, 2)
    weight_CES = torch.full((2, 5, 2), 0.5)
    split.train(split.join(model_CP, offsets_CSQ, prior_CK), data, KEY.at(2), weight_CE=weight_CES)
    assert learner.steps == 3 + 1
    assert "train" in learner.effort.seconds


def test_weights_of_zero_leave_a_head_alone_and_the_others_learn():
    learner, data = learner_of("mlp", training=TrainingOptions(batch=5, momentum=0, epochs=1))
    split, model_CP, offsets_CSQ, prior_CK = parts(learner, 2)
    weight_CES = torch.tensor([1.0, 0.0]).expand(2, 5, 2)
    model_CA = split.join(model_CP, offsets_CSQ, prior_CK)
    _, found_CSQ = split.separate(split.train(model_CA, data, KEY.at(2), weight_CE=weight_CES))
    assert torch.equal(found_CSQ[:, 1], offsets_CSQ[:, 1])
    assert not torch.equal(found_CSQ[:, 0], offsets_CSQ[:, 0])


def test_negative_log_likelihood_is_that_of_a_mixture():
    loss_BS = -torch.tensor([[0.2, 0.8], [0.5, 0.5]]).log()
    u_BS = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    expected_B = -torch.tensor([0.25 * 0.2 + 0.75 * 0.8, 0.5]).log()
    torch.testing.assert_close(negative_log_likelihood(loss_BS, u_BS), expected_B)


def test_cluster_losses_of_a_regression_are_squared_errors():
    learner = Learner(lambda: nn.Linear(1, 1), loss=squared_error, dtype=torch.float64)
    data = Block([0], 1, [torch.tensor([[1.0], [2.0]])], [torch.tensor([[1.0], [0.0]])], 3)
    split = learner.split(2)
    assert split.classes == 0
    model_CA = split.join(
        torch.tensor([[1.0, 0.0]], dtype=torch.double),
        torch.tensor([[[0.0, 0.0], [1.0, 1.0]]], dtype=torch.double),
        torch.zeros(1, 0),
    )
    # heads: x and 2x + 1; errors 0 and 2, then 2 and 5, halved squares; no third example
    assert split.cluster_losses(model_CA, data).tolist() == [[[0.0, 2.0, 0.0], [2.0, 12.5, 0.0]]]


def test_find_head_takes_the_last_linear_layer_or_the_named_one():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.Softmax(1))
    assert find_head(model, None)[0] == "2"
    assert find_head(model, "0")[1] is model[0]


def test_find_head_refuses_an_unknown_name_and_a_model_without_a_linear_layer():
    with pytest.raises(
        ConfigError, match=r"^model\.head = 'last': not a linear layer of the model"
    ):
        find_head(nn.Sequential(nn.Linear(2, 3)), "last")
    with pytest.raises(ConfigError, match=r"^model\.head: the model has no linear layer"):
        find_head(nn.Sequential(nn.ReLU()), None)


def test_tied_head_is_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(self.first(x))

    with pytest.raises(ConfigError, match=r"^model\.head: its parameters are tied"):
        Learner(Tied).split(2)
