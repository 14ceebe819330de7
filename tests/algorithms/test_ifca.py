"""IFCA by hand, with x = 1: a center is a number c with loss 1/2 (c - y)^2 and steps of 0.1.

Shapes: C clients, S clusters, P = 1, E examples.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspd.algorithms.ifca import IFCA, choose
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph

PATH = Graph.from_edges(3, [(0, 1), (1, 2)])


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def start(network, y: list[list[float]], centers_S: list[float], graph: Graph = PATH):
    net = network(
        IFCA(clusters=len(centers_S)),
        [torch.ones_like(column(*own)) for own in y],
        [column(*own) for own in y],
        graph,
    )
    net.state = choose(
        net.learner, torch.tensor([centers_S] * len(y), dtype=torch.float64)[:, :, None], net.data
    )
    return net


def test_ifca_round_equals_numbers_worked_by_hand(network):
    """Client 0 chooses the center 0, clients 1 and 2 choose 10; trained: 0.1, 9.9, 9.8.

    Client 2 receives nothing of the first.
    """
    net = start(network, [[1, 1], [9], [8]], [0, 10])
    assert net.state.mixture_CS.tolist() == [[1, 0], [0, 1], [0, 1]]
    offered = next(net.algorithm.round(net.learner, net.state, net.data, net.key.at(1)))
    assert offered.cluster_CK.tolist() == [[0], [1], [1]]
    assert offered.model_CKP.flatten().tolist() == pytest.approx([0.1, 9.9, 9.8])
    centers_CS = net.run(1).state.centers_CSP[:, :, 0]
    np.testing.assert_allclose(centers_CS, [[0.1, 9.9], [0.1, 9.85], [0, 9.85]])
    assert net.state.loss_C.tolist() == pytest.approx([0.9**2 / 2, 0.85**2 / 2, 1.85**2 / 2])


@pytest.mark.parametrize(
    ("y", "centers", "chosen"),
    [
        (
            [4, 4, 4, 16],
            [0, 10],
            1,
        ),  # 48 + 256 against 4 * 36: the mean decides, not that three of four are nearer to 0
        ([5, 5], [0, 10], 0),  # a tie goes to the lowest label
        ([9], [0, 10, 9], 2),
        ([9], [9, torch.nan], 0),
    ],
)
def test_least_mean_loss_over_all_examples_decides(network, y, centers, chosen):
    state = start(network, [y], centers, Graph.from_edges(1, [])).state
    assert state.mixture_CS.argmax(1).item() == chosen
    assert state.assignment_CE.tolist() == [[chosen] * len(y)]


def test_infinite_loss_is_recorded_as_infinite(network):
    assert start(network, [[1]], [1e300], Graph.from_edges(1, [])).state.loss_C.tolist() == [
        torch.inf
    ]


def test_star_weights_the_clients_of_a_center_by_their_examples(network):
    """Trained: 0.1 with 2 examples, 9.9 with 1, 9.7 with 3."""
    everyone = Graph.from_edges(3, [(0, 1), (0, 2), (1, 2)], "examples", server=True)
    centers_CS = (
        start(network, [[1, 1], [9], [7, 7, 7]], [0, 10], everyone)
        .run(1)
        .state.centers_CSP[:, :, 0]
    )
    np.testing.assert_allclose(centers_CS, [[0.1, (9.9 + 3 * 9.7) / 4]] * 3)


def test_client_predicts_with_its_chosen_center(network):
    net = start(network, [[1, 1], [9], [8]], [0.5, 10])
    outputs = net.algorithm.predict(net.learner, net.state, [column(1), column(2), column(3)])
    assert [output.item() for output in outputs] == [0.5, 20, 30]


def test_newcomer_takes_the_mean_of_the_received_centers_and_chooses(network):
    net = start(network, [[1], [9], [8]], [0, 10])
    net.state = choose(
        net.learner,
        torch.tensor([[0, 10], [2, 20], [50, 60]], dtype=torch.float64)[:, :, None],
        net.data,
    )
    cluster_CK, model_CKP = net.algorithm.share(net.state)
    shared = Exchange(cluster_CK, model_CKP, torch.ones(3, 2), cluster_CK)
    around = Neighbourhood.of(Graph.from_edges(4, [(3, 0), (3, 1)]), [3], shared, np.arange(3))
    state = net.algorithm.join(
        net.learner, Block([3], 4, [column(1)], [column(14)], 1), around, net.key.at(9)
    )
    assert state.centers_CSP.flatten().tolist() == [1, 15]
    assert state.mixture_CS.tolist() == [[0, 1]]
