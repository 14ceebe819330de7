"""FedEM's steps against a Gaussian mixture that numpy computes directly.

1/2 (c x - y)^2 is -log N(y; c x, 1), up to a constant.

Shapes: C clients, S clusters, P = 1 slope, E examples.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspd.algorithms.em import NEWCOMER_STEPS, posterior
from fedspd.algorithms.fedem import FedEM, blended, with_loss
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.learner import Learner, cross_entropy

X = [np.array([1.0, 2.0, -1.0]), np.array([0.5, 3.0])]
Y = [np.array([1.5, -1.0, 2.0]), np.array([0.0, 4.0])]
CENTERS = np.array([[2.0, -1.0], [0.5, 1.0]])  # c_is
MIXTURE = np.array([[0.3, 0.7], [0.9, 0.1]])  # pi_is
PAIR = Graph.from_edges(2, [(0, 1)])


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def start(
    network,
    x,
    y,
    centers_CS: NDArray[np.float64],
    mixture_CS: NDArray[np.float64],
    graph: Graph = PAIR,
):
    net = network(
        FedEM(clusters=2), [column(*own) for own in x], [column(*own) for own in y], graph
    )
    net.state = with_loss(
        net.learner, torch.tensor(centers_CS)[:, :, None], torch.tensor(mixture_CS), net.data
    )
    return net


def responsibilities(x_E, y_E, c_S, pi_S) -> NDArray[np.float64]:
    """q_SE: how likely each example came from each component of unit variance."""
    density_SE = np.exp(-((c_S[:, None] * x_E - y_E) ** 2) / 2) / np.sqrt(2 * np.pi)
    joint_SE = pi_S[:, None] * density_SE
    return joint_SE / joint_SE.sum(0)


def expected_round(centers_CS, mixture_CS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One step of 0.1 on sum_k q_k(s) loss_k / n, then the mean of both clients; and the new pi."""
    trained_CS, pi_CS = np.zeros((2, 2)), np.zeros((2, 2))
    for i in range(2):
        q_SE = responsibilities(X[i], Y[i], centers_CS[i], mixture_CS[i])
        pi_CS[i] = q_SE.mean(1)
        slope_S = (q_SE * (centers_CS[i][:, None] * X[i] - Y[i]) * X[i]).mean(1)
        trained_CS[i] = centers_CS[i] - 0.1 * slope_S
    return np.tile(trained_CS.mean(0), (2, 1)), pi_CS


def test_fedem_rounds_equal_em_of_a_gaussian_mixture(network):
    net = start(network, X, Y, CENTERS, MIXTURE)
    centers_CS, mixture_CS = CENTERS, MIXTURE
    for t in (1, 2):
        centers_CS, mixture_CS = expected_round(centers_CS, mixture_CS)
        net.run(t, first=t)
        np.testing.assert_allclose(net.state.centers_CSP[:, :, 0], centers_CS, rtol=1e-12)
        np.testing.assert_allclose(net.state.mixture_CS, mixture_CS, rtol=1e-12)


def test_fedem_round_equals_numbers_worked_by_hand(network):
    """With x = 1, y = 0 and centers 0 and c, c^2 / 2 = log 3: the first is 3 times as likely."""
    c = np.sqrt(2 * np.log(3))
    net = start(
        network, [[1]], [[0]], np.array([[0, c]]), np.array([[0.5, 0.5]]), Graph.from_edges(1, [])
    ).run(1)
    assert net.state.mixture_CS[0].tolist() == pytest.approx([3 / 4, 1 / 4])
    assert net.state.centers_CSP.flatten().tolist() == pytest.approx(
        [0, c - 0.1 * c / 4]
    )  # a quarter of a step of 0.1


def test_loss_is_the_mean_negative_log_likelihood(network):
    net = start(network, X, Y, CENTERS, MIXTURE)
    for i in range(2):
        error_SE = CENTERS[i][:, None] * X[i] - Y[i]
        joint_SE = MIXTURE[i][:, None] * np.exp(-(error_SE**2) / 2)
        assert net.state.loss_C[i].item() == pytest.approx(-np.log(joint_SE.sum(0)).mean())
        assert net.state.assignment_CE[i, : len(X[i])].tolist() == joint_SE.argmax(0).tolist()
    assert net.state.assignment_CE[1, 2] == -1


def test_posterior_sums_to_one_and_is_zero_beyond_the_examples(network):
    net = start(network, X, Y, CENTERS, MIXTURE)
    total_CE = posterior(net.state.mixture_CS, net.state.losses_CSE, net.data).sum(1)
    torch.testing.assert_close(total_CE, net.data.present_CE.double())


def test_center_that_explains_no_example_gets_no_share(network):
    net = start(network, X, Y, np.array([[1e200, 1], [np.nan, 1]]), MIXTURE)
    q_CSE = posterior(net.state.mixture_CS, net.state.losses_CSE, net.data)
    assert q_CSE[:, 0].sum() == 0
    assert torch.equal(q_CSE[:, 1], net.data.present_CE.double())
    assert net.state.assignment_CE[net.data.present_CE].tolist() == [1] * 5
    net.run(1)
    assert net.state.loss_C.isfinite().all()
    assert all(
        output.isfinite().all()
        for output in net.algorithm.predict(net.learner, net.state, net.data.x)
    )


def test_centers_that_explain_nothing_share_equally_at_an_infinite_loss(network):
    net = start(network, X, Y, np.array([[1e200, np.nan], [np.nan, np.nan]]), MIXTURE)
    assert (
        posterior(net.state.mixture_CS, net.state.losses_CSE, net.data)[0].tolist()
        == [[0.5] * 3] * 2
    )
    assert net.state.loss_C.tolist() == [torch.inf, torch.inf]


def test_regression_is_predicted_by_the_mean_over_the_mixture(network):
    """0.3 * 2 - 0.7 * 1 = -0.1 and 0.9 * 0.5 + 0.1 * 1 = 0.55, times x."""
    net = start(network, X, Y, CENTERS, MIXTURE)
    first, second = net.algorithm.predict(net.learner, net.state, [column(1, 10), column(-2)])
    assert first.flatten().tolist() == pytest.approx([-0.1, -1])
    assert second.flatten().tolist() == pytest.approx([-1.1])


def test_classes_are_predicted_by_the_mixture_of_probabilities():
    """Weights (log 3, 0) and (0, 0) at x = 1: probabilities 3/4, 1/4 and 1/2, 1/2.

    A fifth of the first is 0.55, 0.45.
    """
    learner = Learner(lambda: nn.Linear(1, 2, bias=False), loss=cross_entropy, dtype=torch.float64)
    centers_SP = torch.tensor([[np.log(3), 0], [0, 0]])
    output = blended(learner, centers_SP, torch.tensor([0.2, 0.8]), column(1))
    assert output.exp().flatten().tolist() == pytest.approx([0.55, 0.45])


def test_newcomer_keeps_the_received_centers_and_fits_its_mixture(network):
    net = start(network, X, Y, np.tile([2.0, -1.0], (2, 1)), MIXTURE)
    x, y = np.array([1.0, 1.0, 2.0, -1.0]), np.array([2.1, 1.8, 3.9, 1.1])
    newcomer = Block([2], 3, [column(*x)], [column(*y)], 4)
    cluster_CK, model_CKP = net.algorithm.share(net.state)
    shared = Exchange(cluster_CK, model_CKP, torch.ones(2, 2), cluster_CK)
    graph = Graph.from_edges(3, [(0, 1), (1, 2), (0, 2)])
    state = net.algorithm.join(
        net.learner, newcomer, Neighbourhood.of(graph, [2], shared, np.arange(2)), net.key.at(5)
    )
    pi_S = np.array([0.5, 0.5])
    for _ in range(NEWCOMER_STEPS):
        pi_S = responsibilities(x, y, np.array([2.0, -1.0]), pi_S).mean(1)
    assert state.centers_CSP.flatten().tolist() == [2.0, -1.0]
    np.testing.assert_allclose(state.mixture_CS[0], pi_S, rtol=1e-12)
    joint_SE = pi_S[:, None] * np.exp(-((y - np.array([[2.0], [-1.0]]) * x) ** 2) / 2)
    assert state.loss_C.item() == pytest.approx(-np.log(joint_SE.sum(0)).mean())
    assert state.assignment_CE.tolist() == [[0, 0, 0, 1]]
    assert pi_S[0] == pytest.approx(
        0.75, abs=0.05
    )  # three of its four examples lie on the first line
