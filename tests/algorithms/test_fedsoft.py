"""FedSoft by hand, with x = 1: a model is a number w with loss 1/2 (w - y)^2 and steps of 0.1.

Shapes: C clients, N clients of the network, S clusters, P = 1, E examples.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspd.algorithms.fedsoft import FedSoft
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph

ALONE = Graph.from_edges(1, [])


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def complete(n: int, server: bool = False) -> Graph:
    return Graph.from_edges(
        n, [(i, j) for i in range(n) for j in range(i)], "examples" if server else "uniform", server
    )


def start(
    network,
    algorithm: FedSoft,
    y: list[list[float]],
    graph: Graph,
    *,
    w: float = 0,
    centers: list[float],
    u: list | None = None,
):
    net = network(
        algorithm, [torch.ones_like(column(*own)) for own in y], [column(*own) for own in y], graph
    )
    centers_CSP = torch.tensor([centers] * len(y), dtype=torch.float64)[:, :, None]
    net.state = replace(
        net.state, model_CP=torch.full((len(y), 1), w, dtype=torch.float64), centers_CSP=centers_CSP
    )
    if u is not None:
        net.state = replace(net.state, mixture_CS=torch.tensor(u, dtype=torch.float64))
    return net


# ---- u


def test_shares_count_examples_by_least_loss_and_replace_zero_by_sigma(network):
    """Centers 0 and 10: y = 1, 2, 3 are nearer to the first; a tie goes to the lowest label."""
    net = start(network, FedSoft(sigma=1e-3), [[1, 2, 3, 9], [5, 1]], complete(2), centers=[0, 10])
    state = net.algorithm.estimate(net.learner, net.state, net.data)
    assert state.mixture_CS.tolist() == [[0.75, 0.25], [1.0, 1e-3]]
    assert state.assignment_CE.tolist() == [[0, 0, 0, 1], [0, 0, -1, -1]]


def test_sigma_is_a_ten_thousandth_by_default(network):
    net = start(network, FedSoft(), [[1]], ALONE, centers=[0, 10])
    assert net.algorithm.estimate(net.learner, net.state, net.data).mixture_CS.tolist() == [
        [1.0, 1e-4]
    ]


def test_center_that_is_not_a_number_has_no_example(network):
    net = start(network, FedSoft(), [[1, 9]], ALONE, centers=[torch.nan, 10])
    assert net.algorithm.estimate(net.learner, net.state, net.data).mixture_CS.tolist() == [
        [1e-4, 1.0]
    ]


@pytest.mark.parametrize(
    ("estimate_every", "rounds"), [(1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (3, [1, 4])]
)
def test_u_is_estimated_in_round_1_and_every_estimate_every_rounds(network, estimate_every, rounds):
    net = start(network, FedSoft(estimate_every=estimate_every), [[1, 9]], ALONE, centers=[0, 10])
    told = torch.tensor([[0.9, 0.1]], dtype=torch.float64)
    estimated = []
    for t in range(1, 6):
        net.state = replace(net.state, mixture_CS=told)
        if not torch.equal(net.run(t, first=t).state.mixture_CS, told):
            estimated.append(t)
    assert estimated == rounds


# ---- w


def test_proximal_term_pulls_to_the_centers(network):
    """From w = 4 with y = 10: slope (4 - 10) + 2 (0.25 (4 - 0) + 0.75 (4 - 8)) = -10; w = 5."""
    net = start(network, FedSoft(lambda_=2), [[10]], ALONE, w=4, centers=[0, 8], u=[[0.25, 0.75]])
    assert net.run(2, first=2).state.model_CP.item() == pytest.approx(5)
    assert net.state.loss_C.item() == pytest.approx(25 / 2)


def test_shares_with_sigma_pull_more_than_lambda(network):
    """u = (1, 0.5) sums to 1.5: slope (4 - 10) + 2 (1 (4 - 0) + 0.5 (4 - 8)) = -2; w = 4.2."""
    net = start(
        network, FedSoft(lambda_=2, sigma=0.5), [[10]], ALONE, w=4, centers=[0, 8], u=[[1, 0.5]]
    )
    assert net.run(2, first=2).state.model_CP.item() == pytest.approx(4.2)


def test_personal_model_continues_from_its_last_value(network):
    """lambda = 0: two plain steps take 0.19 off the distance to y, for any centers."""
    net = start(network, FedSoft(lambda_=0), [[10]], ALONE, centers=[-99, 99]).run(2)
    assert net.state.model_CP.item() == pytest.approx(1.9)
    assert net.algorithm.predict(net.learner, net.state, [column(3)])[0].item() == pytest.approx(
        5.7
    )


# ---- votes, on a graph


def test_votes_fall_with_probability_u(network):
    u_CS = np.array([[0.2, 0.1, 0.7], [0.5, 0.5, 1e-4]])
    net = start(
        network, FedSoft(clusters=3), [[1], [2]], complete(2), centers=[0, 1, 2], u=u_CS.tolist()
    )
    draws, count_CS = 2000, np.zeros((2, 3))
    for t in range(draws):
        with pytest.raises(StopIteration) as end:
            next(net.algorithm.votes(net.state, net.data, net.key.at(t)))
        count_CS += np.eye(3)[end.value.value[:, 0].numpy()]
    chance_CS = u_CS / u_CS.sum(1, keepdims=True)
    assert (
        np.abs(count_CS / draws - chance_CS) <= 4 * np.sqrt(chance_CS * (1 - chance_CS) / draws)
    ).all()


def test_center_becomes_the_mean_of_its_votes_or_is_kept(network):
    """Path 0 - 1 - 2. w = 1, 2, 4 after a step from 0.

    Clients 0 and 1 vote for cluster 0, client 2 for cluster 1, none for 2.
    """
    certain = [[1, 0, 0], [1, 0, 0], [0, 1, 0]]
    path = Graph.from_edges(3, [(0, 1), (1, 2)])
    net = start(
        network,
        FedSoft(clusters=3, lambda_=0),
        [[10], [20], [40]],
        path,
        centers=[-1, -2, -3],
        u=certain,
    ).run(2, first=2)
    assert net.state.model_CP.flatten().tolist() == pytest.approx([1, 2, 4])
    np.testing.assert_allclose(
        net.state.centers_CSP[:, :, 0], [[1.5, -2, -3], [1.5, 4, -3], [2, 4, -3]]
    )


# ---- votes, on a star


def on_a_star(
    network, select: int | None, y: list[list[float]], u: list[list[float]], clusters: int = 2
):
    graph = complete(len(y), server=True)
    return start(
        network,
        FedSoft(clusters=clusters, lambda_=0, select=select),
        y,
        graph,
        centers=[-1.0] * clusters,
        u=u,
    )


def test_server_that_picks_all_clients_averages_their_models_by_examples(network):
    """w = 1 with one example, 2 with three: (1 + 3 * 2) / 4."""
    net = on_a_star(network, 2, [[10], [20, 20, 20]], [[0.9, 0.1], [0.2, 0.8]]).run(2, first=2)
    np.testing.assert_allclose(net.state.centers_CSP[:, :, 0], np.full((2, 2), 7 / 4))
    assert net.state.model_CP.flatten().tolist() == pytest.approx([1, 2])


def answered(net, asked, offers: Exchange, silent: int | None = None):
    """The answer to all clients, with or without a silent one."""
    speakers = np.array([i for i in range(len(net.data)) if i != silent])
    spoken = Exchange(
        *(
            table[speakers]
            for table in (offers.cluster_CK, offers.model_CKP, offers.weight_CK, offers.want_CM)
        )
    )
    with pytest.raises(StopIteration) as end:
        asked.send(Neighbourhood.of(net.graph, net.data.clients, spoken, speakers))
    return end.value.value


def picks(net, t: int, silent: int | None = None) -> Tensor:
    """picked_CS: whether the server picked a client for a cluster."""
    asked = net.algorithm.picked_by_server(net.state, net.data, net.key.at(t))
    vote_CS = answered(net, asked, next(asked), silent)
    assert ((vote_CS == -1) | (vote_CS == torch.arange(vote_CS.shape[1]))).all()
    return vote_CS >= 0


def test_server_picks_by_share_times_examples(network):
    """n = 1, 3, 6 and u_i0 = 0.5, 0.5, 0.25: chances 0.5, 1.5, 1.5 of 3.5.

    u_i1 = 0.5, 0.5, 0.75: 0.5, 1.5, 4.5 of 6.5.
    """
    net = on_a_star(network, 1, [[1], [1] * 3, [1] * 6], [[0.5, 0.5], [0.5, 0.5], [0.25, 0.75]])
    draws = 1500
    share_CS = sum(picks(net, t).double().numpy() for t in range(draws)) / draws
    chance_CS = np.array([[0.5 / 3.5, 0.5 / 6.5], [1.5 / 3.5, 1.5 / 6.5], [1.5 / 3.5, 4.5 / 6.5]])
    assert (np.abs(share_CS - chance_CS) <= 4 * np.sqrt(chance_CS * (1 - chance_CS) / draws)).all()


@pytest.mark.parametrize(("select", "picked"), [(1, 1), (4, 4), (99, 5), (None, 2)])
def test_server_picks_select_clients_per_cluster_and_half_by_default(network, select, picked):
    net = on_a_star(network, select, [[1]] * 5, [[0.5, 0.5, 1e-4]] * 5, clusters=3)
    for t in range(20):
        assert picks(net, t).sum(0).tolist() == [picked] * 3


@pytest.mark.parametrize("silent", [0, 2, 4])
@pytest.mark.parametrize("select", [4, 5])
def test_server_picks_among_the_clients_that_answered(network, silent, select):
    net = on_a_star(network, select, [[1]] * 5, [[0.5, 0.5]] * 5)
    for t in range(5):
        assert picks(net, t, silent).all(1).nonzero().flatten().tolist() == [
            i for i in range(5) if i != silent
        ]


# ---- a newcomer


def test_newcomer_estimates_its_shares_and_starts_from_its_weighted_center(network):
    """Received: centers 0 and 8. Three of four y are nearer to 8, so w starts at 6.

    The slope is (6 - 7) + 2 * 0, so w becomes 6.1.
    """
    net = start(network, FedSoft(lambda_=2), [[1], [9]], complete(2), centers=[0, 8])
    cluster_CK, model_CKP = net.algorithm.share(net.state)
    shared = Exchange(cluster_CK, model_CKP, torch.ones(2, 2), cluster_CK)
    around = Neighbourhood.of(Graph.from_edges(3, [(2, 0), (2, 1)]), [2], shared, np.arange(2))
    newcomer = Block([2], 3, [column(1, 1, 1, 1)], [column(0, 9, 9, 10)], 4)
    state = net.algorithm.join(net.learner, newcomer, around, net.key.at(3))
    assert state.centers_CSP.flatten().tolist() == [0, 8]
    assert state.mixture_CS.tolist() == [[0.25, 0.75]]
    assert state.model_CP.item() == pytest.approx(6.1)
    assert state.loss_C.item() == pytest.approx((6.1**2 + 2 * 2.9**2 + 3.9**2) / 2 / 4)
