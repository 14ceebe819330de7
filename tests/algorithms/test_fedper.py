"""FedPer and FedRep by hand, with x = 1: a model is v b, with loss 1/2 (v b - y)^2, steps of 0.1.

Shapes: C clients, P = 2: the body b, then the head v.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspd.algorithms.facade import FACADE
from fedspd.algorithms.fedper import FedPer, state_of
from fedspd.algorithms.fedrep import FedRep
from fedspd.algorithms.local import Local
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.learner import TrainingOptions, cross_entropy

PAIR = Graph.from_edges(2, [(0, 1)])
PLAIN = {"lr": 0.1, "momentum": 0, "batch": 1000, "first_round_factor": 1, "decay": 1}
BOTH = pytest.mark.parametrize("method", [FedPer, FedRep])


def product() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def start(network, method, y: list[list[float]], epochs: int = 1):
    """Two clients whose model is 2 * 1."""
    x = [torch.ones_like(column(*own)) for own in y]
    training = TrainingOptions(**PLAIN, epochs=epochs)
    options = {"factory": product, "training": training}
    net = network(method(), x, [column(*own) for own in y], PAIR, **options)
    model_CP = torch.tensor([[1.0, 2.0]] * len(y), dtype=torch.float64)
    net.state = state_of(net.learner, model_CP, torch.zeros(len(y)))
    return net


def test_fedper_averages_the_body_and_keeps_the_head(network):
    """Errors 1 and -1: bodies 1 - 0.2 and 1 + 0.2, heads 2 - 0.1 and 2 + 0.1."""
    net = start(network, FedPer, [[1], [3]])
    offered = next(net.algorithm.round(net.learner, net.state, net.data, net.key.at(1)))
    np.testing.assert_allclose(offered.model_CKP, [[[0.8]], [[1.2]]])
    np.testing.assert_allclose(net.run(1).state.model_CP, [[1.0, 1.9], [1.0, 2.1]])


def test_fedrep_trains_the_head_then_the_body_under_it(network):
    """Heads 1.9 and 2.1 on the body 1; then errors 0.9 and -0.9, bodies 1 - 0.09 v and 1 + 0.09 v.

    So 0.829 and 1.189, whose mean is 1.009.
    """
    net = start(network, FedRep, [[1], [3]], epochs=2)
    offered = next(net.algorithm.round(net.learner, net.state, net.data, net.key.at(1)))
    np.testing.assert_allclose(offered.model_CKP, [[[0.829]], [[1.189]]])
    np.testing.assert_allclose(net.run(1).state.model_CP, [[1.009, 1.9], [1.009, 2.1]])


def test_fedrep_gives_the_head_the_larger_part_of_odd_epochs(network):
    """Client 0 with three epochs: heads 1.9, then 1.81; error 0.81, body 1 - 0.081 * 1.81."""
    net = start(network, FedRep, [[1], [3]], epochs=3)
    offered = next(net.algorithm.round(net.learner, net.state, net.data, net.key.at(1)))
    assert offered.model_CKP[0].item() == pytest.approx(1 - 0.081 * 1.81)
    assert net.run(1).state.model_CP[0, 1].item() == pytest.approx(1.81)


def test_fedrep_divides_a_single_epoch_by_examples(network):
    """All examples of a client are alike, so it doesn't matter which half is which."""
    net = start(network, FedRep, [[1, 1, 1, 1], [3]])
    offered = next(net.algorithm.round(net.learner, net.state, net.data, net.key.at(1)))
    assert offered.model_CKP[0].item() == pytest.approx(0.829)
    assert offered.model_CKP[1].item() == 1, "the only example trains the head"


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_fedrep_takes_the_steps_of_the_other_methods(network, epochs):
    """Nine examples in batches of four are three steps an epoch; halves of 5 and 4 take 2 + 1."""
    x, alone = [torch.ones(9, 1, dtype=torch.float64)], Graph.from_edges(1, [])
    training = TrainingOptions(**{**PLAIN, "batch": 4}, epochs=epochs)
    net = network(FedRep(), x, x, alone, factory=product, training=training)
    assert net.simulator.round(1, alone).steps == 3 * epochs


@BOTH
def test_model_that_is_one_linear_layer_trains_alone(network, method):
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(count, 4, generator=generator) for count in (6, 5)]
    y = [torch.arange(len(own)) % 3 for own in x]
    options = {"factory": lambda: nn.Linear(4, 3), "loss": cross_entropy}
    net = network(method(), x, y, PAIR, **options)
    assert net.simulator.round(1, PAIR).traffic == []
    alone = network(Local(), x, y, PAIR, **options).run(3)
    assert torch.equal(net.run(3, first=2).state.model_CP, alone.state.model_CP)
    cluster_CK, _ = net.algorithm.share(net.state)
    assert cluster_CK.shape == (2, 0)


@pytest.mark.parametrize("method", [FedPer, FedRep, FACADE])
def test_model_without_a_linear_layer_is_refused(network, method):
    x = [torch.ones(2, 1, 1, dtype=torch.float64)]
    with pytest.raises(ConfigError, match=r"^model\.head: the model has no linear layer"):
        network(method(), x, x, Graph.from_edges(1, []), factory=lambda: nn.Conv1d(1, 1, 1))


@BOTH
def test_newcomer_trains_a_head_on_the_mean_body(network, method):
    net = start(network, method, [[1], [3]])
    model_CP = torch.tensor([[1.0, 7.0], [3.0, 9.0]], dtype=torch.float64)
    net.state = state_of(net.learner, model_CP, torch.zeros(2))
    cluster_CK, body_CKB = net.algorithm.share(net.state)
    assert body_CKB.flatten().tolist() == [1, 3], "no head is shared"
    shared = Exchange(cluster_CK, body_CKB, torch.ones(2, 1), cluster_CK)
    around = Neighbourhood.of(Graph.from_edges(3, [(2, 0), (2, 1)]), [2], shared, np.arange(2))
    data = Block([2], 3, [column(1)], [column(8)], 1)
    state = net.algorithm.join(net.learner, data, around, net.key.at(9))
    first = net.algorithm.begin(net.learner, data, net.key).model_CP[0, 1].item()
    assert state.model_CP[0, 0].item() == 2
    assert abs(2 * state.model_CP[0, 1].item() - 8) < abs(2 * first - 8) / 2
