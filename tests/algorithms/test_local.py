"""Local-only training by hand. Shapes: C clients, P parameters of a model."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedspd.algorithms.local import Local
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def test_local_rounds_equal_numbers_worked_by_hand_and_send_nothing(network):
    """x = 1 and y = 10, 20; every step of 0.1 takes a tenth off the distance to y."""
    net = network(
        Local(),
        [column(1), column(1, 1)],
        [column(10), column(20, 20)],
        Graph.from_edges(2, [(0, 1)]),
    )
    net.state = replace(net.state, model_CP=torch.zeros_like(net.state.model_CP))
    assert net.simulator.round(1, net.graph).traffic == []
    assert net.state.model_CP.flatten().tolist() == pytest.approx([1, 2])
    net.run(3, first=2)
    assert net.state.model_CP.flatten().tolist() == pytest.approx(
        [10 * (1 - 0.9**3), 20 * (1 - 0.9**3)]
    )
    assert net.state.loss_C.tolist() == pytest.approx(
        [(10 * 0.9**3) ** 2 / 2, (20 * 0.9**3) ** 2 / 2]
    )


def test_newcomer_trains_for_as_many_rounds_as_the_others(network):
    net = network(Local(), [column(1)], [column(10)], Graph.from_edges(2, [(0, 1)]))
    newcomer = Block([1], 2, [column(1)], [column(5)], 1)
    cluster_CK, model_CKP = net.algorithm.share(net.state)
    shared = Exchange(cluster_CK, model_CKP, cluster_CK, cluster_CK)
    key = net.key.at(4)
    state = net.algorithm.join(
        net.learner,
        newcomer,
        Neighbourhood.of(net.graph, [1], shared, torch.tensor([0]).numpy()),
        key,
    )
    first = net.algorithm.begin(net.learner, newcomer, key).model_CP.item()
    assert state.model_CP.item() == pytest.approx(5 - (5 - first) * 0.9**4)
