"""Theorem 2 as an identity, for every cluster.

C^t = (W^{t-1} ... W^0) C^0 - sum_m eta (W^{t-1} ... W^m) G^m. The losses are quadratic, so a
gradient is the mean of x (x . c - y) over the assigned examples.

Shapes: N clients, S clusters, D dimensions.
"""

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch

from fedspd.algorithms.fedspd import FedSPD
from fedspd.core.graph import Graph
from fedspd.topology import graph_mixing_matrix

N, S, D, ROUNDS = 8, 2, 3, 12
EDGES = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 0), (0, 4), (0, 2)]


def examples() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Client i has 10 + 3 i examples of two slopes."""
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(10 + 3 * i, D)) for i in range(N)]
    slopes = np.array([[2.0, 0.0, 1.0], [-1.0, 1.0, 0.0]])
    y = [(own * slopes[rng.integers(2, size=len(own))]).sum(1, keepdims=True) for own in x]
    return [torch.from_numpy(own) for own in x], [torch.from_numpy(own) for own in y]


def gradients(net, s: int, active_N: np.ndarray) -> np.ndarray:
    """G of cluster s: the gradient at every client that chose s, 0 at the others."""
    gradient_ND = np.zeros((N, D))
    for i in np.flatnonzero(active_N):
        assigned = (net.state.assignment_CE[i, : len(net.data.y[i])] == s).numpy()
        x, y = net.data.x[i].numpy()[assigned], net.data.y[i].numpy()[assigned, 0]
        gradient_ND[i] = (x * (x @ net.state.centers_CSP[i, s].numpy() - y)[:, None]).mean(0)
    return gradient_ND


def closed_form(
    start_ND: np.ndarray, links: list[np.ndarray], gradients: list[np.ndarray], eta: float
) -> np.ndarray:
    def product(m: int) -> np.ndarray:
        return reduce(np.matmul, reversed(links[m:]), np.eye(N))

    return product(0) @ start_ND - sum(
        eta * product(m) @ gradient for m, gradient in enumerate(gradients)
    )


@pytest.mark.parametrize("rule", ["uniform", "metropolis", "examples"])
def test_centers_after_t_rounds_equal_the_closed_form(network, rule):
    net = network(
        FedSPD(clusters=S, init="own", align_every=0), *examples(), Graph.from_edges(N, EDGES, rule)
    )
    start_NSD = net.state.centers_CSP.numpy()
    links, slopes = ([[] for _ in range(S)] for _ in range(2))
    for t in range(1, ROUNDS + 1):
        chosen_N = net.chosen(t)[:, 0].numpy()
        for s in range(S):
            behind_N = (net.state.assignment_CE == s).sum(1).numpy()
            links[s].append(graph_mixing_matrix(net.graph, chosen_N == s, behind_N).toarray())
            slopes[s].append(gradients(net, s, chosen_N == s))
        net.run(t, first=t)
        for s in range(S):
            expected = closed_form(start_NSD[:, s], links[s], slopes[s], net.learner.training.lr)
            np.testing.assert_allclose(net.state.centers_CSP[:, s], expected, rtol=0, atol=1e-10)
    for s in range(S):
        assert any((link != np.eye(N)).any() for link in links[s])  # neighbours did meet


@pytest.mark.parametrize("rule", ["uniform", "metropolis"])
def test_client_keeps_the_center_of_another_cluster_to_the_bit(network, rule):
    net = network(FedSPD(clusters=3, align_every=0), *examples(), Graph.from_edges(N, EDGES, rule))
    for t in range(1, 6):
        before, chosen = net.state.centers_CSP, net.chosen(t)
        after = net.run(t, first=t).state.centers_CSP
        for i in range(N):
            for s in range(3):
                assert torch.equal(before[i, s], after[i, s]) == (s != chosen[i, 0])


def test_metropolis_keeps_the_networks_mean_without_training(network):
    """Lemma A.1 through the whole method.

    Data that every center explains leave only the averaging.
    """
    x, _ = examples()
    y = [torch.zeros(len(own), 1, dtype=torch.float64) for own in x]
    nothing = [torch.zeros_like(own) for own in x]
    net = network(
        FedSPD(clusters=S, init="own", align_every=0),
        nothing,
        y,
        Graph.from_edges(N, EDGES, "metropolis"),
    )
    net.state = replace(net.state, trained_CS=torch.zeros(N, S, dtype=torch.bool))
    before = net.state.centers_CSP
    after = net.run(5).state.centers_CSP
    assert not torch.allclose(before, after)
    torch.testing.assert_close(before.mean(0), after.mean(0), rtol=0, atol=1e-14)
