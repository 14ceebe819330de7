"""FACADE by hand, with x = 1: a model is v b, with loss 1/2 (v b - y)^2 and steps of 0.1.

Shapes: C clients, S clusters, P = 2: the body b, then the head v.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspd.algorithms.facade import FACADE
from fedspd.algorithms.fedavg import FedAvg
from fedspd.algorithms.ifca import choose
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.learner import TrainingOptions, cross_entropy

EDGES = [(0, 1), (1, 2)]
PATH = Graph.from_edges(3, EDGES)


def product() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def start(network, y: list[list[float]], heads: list[float], graph: Graph = PATH):
    """Clients whose body is 1."""
    x = [torch.ones_like(column(*own)) for own in y]
    algorithm = FACADE(clusters=len(heads))
    net = network(algorithm, x, [column(*own) for own in y], graph, factory=product)
    centers_SP = torch.tensor([[1.0, head] for head in heads], dtype=torch.float64)
    net.state = choose(net.learner, centers_SP.repeat(len(y), 1, 1), net.data)
    return net


def test_facade_round_equals_numbers_worked_by_hand(network):
    """Client 0 chooses the head 0, the others 10. Errors -1, 1, 2; gradients v e and b e.

    Trained bodies: 1, 0, -1; trained heads: 0.1, 9.9, 9.8. Client 1 averages its own head 0, which
    it did not train, with client 0's; client 0 does so with its own head 10.
    """
    net = start(network, [[1], [9], [8]], [0, 10])
    assert net.state.mixture_CS.tolist() == [[1, 0], [0, 1], [0, 1]]
    centers_CSP = net.run(1).state.centers_CSP
    np.testing.assert_allclose(centers_CSP[:, :, 0], [[0.5, 0.5], [0, 0], [-0.5, -0.5]], atol=1e-15)
    heads_CS = [[0.1, (10 + 9.9) / 2], [0.1 / 2, 9.85], [0, 9.85]]
    np.testing.assert_allclose(centers_CSP[:, :, 1], heads_CS)


@pytest.mark.parametrize(
    ("rule", "head"),
    [
        ("metropolis", 0.1 / 3),  # the link weighs 1 / (1 + 2), one's own head the rest
        ("examples", 0.1 / 4),  # one example at client 0, three at client 1
        ("median", 0.0),  # two models are too few for a robust rule: it keeps its own
        ("clipped", 0.0),
    ],
)
def test_untrained_head_of_a_client_counts_as_its_own_by_every_rule(network, rule, head):
    graph = Graph.from_edges(3, EDGES, rule)
    net = start(network, [[1], [9, 9, 9], [8]], [0, 10], graph).run(1)
    assert net.state.centers_CSP[1, 0, 1].item() == pytest.approx(head)


def test_complete_graph_counts_every_clients_own_head(network):
    """All trained: 0.1, 9.9, 9.8. A complete graph has no lists of neighbours."""
    net = start(network, [[1], [9], [8]], [0, 10], Graph.complete(3)).run(1)
    heads_CS = [[0.1, (10 + 9.9 + 9.8) / 3], [0.05, 9.85], [0.05, 9.85]]
    np.testing.assert_allclose(net.state.centers_CSP[:, :, 1], heads_CS)


def test_server_averages_the_chosen_heads_alone(network):
    """Two examples behind the head 0.1, one behind 9.9, three behind 9.8; bodies 1, 0 and -1."""
    everyone = Graph.from_edges(3, [(0, 1), (0, 2), (1, 2)], "examples", server=True)
    net = start(network, [[1, 1], [9], [8, 8, 8]], [0, 10], everyone).run(1)
    body = (2 * 1 + 0 - 3) / 6
    expected = [[body, 0.1], [body, (9.9 + 3 * 9.8) / 4]]
    np.testing.assert_allclose(net.state.centers_CSP, [expected] * 3)


def test_one_model_is_sent_as_body_and_chosen_head(network):
    net = start(network, [[1], [9], [8]], [0, 10])
    body, head = net.simulator.round(1, PATH).traffic
    assert (body.model_bytes, head.model_bytes) == (8, 8)
    assert (body.is_model, head.is_model) == (True, False)
    sent = sorted(map(tuple, head.transfer_T3.tolist()))
    assert sent == [(0, 1, 0), (1, 0, 1), (1, 2, 1), (2, 1, 1)]


@pytest.mark.parametrize("rule", ["uniform", "metropolis", "examples"])
def test_one_cluster_is_fedavg_to_the_bit(network, rule):
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(count, 4, generator=generator) for count in (6, 1, 9)]
    y = [torch.arange(len(own)) % 3 for own in x]
    options = {
        "factory": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
        "loss": cross_entropy,
        "training": TrainingOptions(batch=4, epochs=2),
    }
    graph = Graph.from_edges(3, EDGES, rule)
    one = network(FACADE(clusters=1), x, y, graph, **options).run(3)
    average = network(FedAvg(), x, y, graph, **options).run(3)
    assert torch.equal(one.state.chosen_CP, average.state.model_CP)


def test_first_heads_are_draws_that_all_clients_share_on_one_body(network):
    x = [torch.ones(2, 1, dtype=torch.float64)] * 3
    net = network(FACADE(clusters=3), x, x, PATH, factory=product)
    centers_CSP = net.state.centers_CSP
    assert torch.equal(centers_CSP, centers_CSP[:1].expand_as(centers_CSP))
    assert len(set(centers_CSP[0, :, 0].tolist())) == 1
    assert len(set(centers_CSP[0, :, 1].tolist())) == 3


def test_model_without_a_body_sends_heads_alone(network):
    x = [torch.ones(2, 1, dtype=torch.float64)] * 3
    (heads,) = network(FACADE(), x, x, PATH).simulator.round(1, PATH).traffic
    assert heads.is_model
    assert heads.model_bytes == 8


def test_newcomer_takes_the_mean_of_body_and_heads_and_chooses(network):
    net = start(network, [[1], [9], [8]], [0, 10])
    centers = [[[1, 0], [1, 10]], [[3, 2], [3, 20]], [[50, 50], [50, 60]]]
    net.state = choose(net.learner, torch.tensor(centers, dtype=torch.float64), net.data)
    cluster_CK, model_CKP = net.algorithm.share(net.state)
    shared = Exchange(cluster_CK, model_CKP, torch.ones(3, 2), cluster_CK)
    around = Neighbourhood.of(Graph.from_edges(4, [(3, 0), (3, 1)]), [3], shared, np.arange(3))
    data = Block([3], 4, [column(1)], [column(28)], 1)
    state = net.algorithm.join(net.learner, data, around, net.key.at(9))
    assert state.centers_CSP.tolist() == [[[2, 1], [2, 15]]]
    assert state.mixture_CS.tolist() == [[0, 1]]
