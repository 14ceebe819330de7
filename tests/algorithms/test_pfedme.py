"""pFedMe, by hand, and against the Moreau envelope of a quadratic.

Shapes: C clients, P parameters of a model, E examples.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspd.algorithms.fedavg import FedAvg
from fedspd.algorithms.pfedme import PFedMe, draw_batches
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.learner import TrainingOptions, cross_entropy

ALONE, PAIR = Graph.from_edges(1, []), Graph.from_edges(2, [(0, 1)])
PLAIN = TrainingOptions(lr=0.1, momentum=0, batch=1000, epochs=1, first_round_factor=1, decay=1)


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def from_zero(network, algorithm: PFedMe, *y: float, training: TrainingOptions = PLAIN):
    """x = 1 and one y for each client, on a complete graph, all from w = 0."""
    net = network(
        algorithm,
        [column(1)] * len(y),
        [column(own) for own in y],
        PAIR if len(y) == 2 else ALONE,
        training=training,
    )
    zero_CP = torch.zeros_like(net.state.model_CP)
    net.state = replace(net.state, model_CP=zero_CP, personal_CP=zero_CP)
    return net


# ---- by hand: lambda = 2, both rates 0.1


@pytest.mark.parametrize(
    ("K", "R", "theta", "w"),
    [
        (1, 1, 1.0, 0.2),  # theta = 0 - 0.1 (0 - 10); w = 0 + 0.1 * 2 * (1 - 0)
        (2, 1, 1.7, 0.34),  # then 1 - 0.1 ((1 - 10) + 2 (1 - 0)): the anchor is w = 0, not theta
        (1, 2, 1.74, 0.508),  # 1 - 0.1 ((1 - 10) + 2 (1 - 0.2)); w = 0.2 + 0.2 (1.74 - 0.2)
    ],
)
def test_pfedme_round_equals_numbers_worked_by_hand(network, K, R, theta, w):
    state = from_zero(network, PFedMe(K=K, R=R, lambda_=2, personal_lr=0.1), 10).run(1).state
    assert state.personal_CP.item() == pytest.approx(theta)
    assert state.model_CP.item() == pytest.approx(w)
    assert state.loss_C.item() == pytest.approx((theta - 10) ** 2 / 2)


def test_theta_starts_from_w_in_every_round(network):
    """After round 1: theta = 1, w = 0.2.

    Then theta = 0.2 - 0.1 (0.2 - 10) = 1.18, wherever the last theta was.
    """
    state = from_zero(network, PFedMe(K=1, R=1, lambda_=2, personal_lr=0.1), 10).run(2).state
    assert state.personal_CP.item() == pytest.approx(1.18)
    assert state.model_CP.item() == pytest.approx(0.2 + 0.2 * (1.18 - 0.2))


@pytest.mark.parametrize(("beta", "w"), [(1, 0.4), (0.5, 0.2), (2, 0.8)])
def test_w_moves_by_beta_towards_the_neighbourhoods_mean(network, beta, w):
    """y = 10 and 30: theta = 1 and 3, w = 0.2 and 0.6, whose mean is 0.4.

    Before the round it was 0.
    """
    state = (
        from_zero(network, PFedMe(K=1, R=1, lambda_=2, personal_lr=0.1, beta=beta), 10, 30)
        .run(1)
        .state
    )
    assert state.model_CP.flatten().tolist() == pytest.approx([w, w])
    assert state.personal_CP.flatten().tolist() == pytest.approx([1, 3])


def test_theta_trains_without_momentum(network):
    algorithm = PFedMe(K=3, R=2, lambda_=2, personal_lr=0.1)
    plain, heavy = (
        from_zero(network, algorithm, 10, training=PLAIN.model_copy(update={"momentum": momentum}))
        .run(2)
        .state
        for momentum in (0, 0.9)
    )
    assert torch.equal(plain.personal_CP, heavy.personal_CP)


def test_client_predicts_with_theta(network):
    net = from_zero(network, PFedMe(K=1, R=1, lambda_=2, personal_lr=0.1), 10, 30).run(1)
    assert [
        output.item()
        for output in net.algorithm.predict(net.learner, net.state, [column(5), column(5)])
    ] == pytest.approx([5, 15])


# ---- the Moreau envelope F(w) = min over theta of f(theta) + lambda/2 ||theta - w||^2

X = np.array([[1.0, 2.0], [0.0, 1.0], [-1.0, 0.5]])
Y = np.array([1.0, -2.0, 3.0])
W, LAMBDA = np.array([0.7, -0.4]), 3.0


def closest(w: np.ndarray) -> np.ndarray:
    """f = 1/2 theta A theta - b theta + const, so theta = (A + lambda I)^-1 (b + lambda w)."""
    A, b = X.T @ X / 3, X.T @ Y / 3
    return np.linalg.solve(A + LAMBDA * np.eye(2), b + LAMBDA * w)


def envelope(w: np.ndarray) -> float:
    theta = closest(w)
    return float(((X @ theta - Y) ** 2).mean() / 2 + LAMBDA / 2 * ((theta - w) ** 2).sum())


def test_many_steps_reach_the_proximal_point_and_w_descends_the_envelope(network):
    net = network(
        PFedMe(K=500, R=1, lambda_=LAMBDA, personal_lr=0.1), [torch.tensor(X)], [column(*Y)], ALONE
    )
    net.state = replace(net.state, model_CP=torch.tensor(W)[None])
    net.run(1)
    np.testing.assert_allclose(net.state.personal_CP[0], closest(W), rtol=1e-12)
    np.testing.assert_allclose(
        net.state.model_CP[0], W - 0.1 * LAMBDA * (W - closest(W)), rtol=1e-12
    )
    slope = [(envelope(W + step) - envelope(W - step)) / 2e-4 for step in 1e-4 * np.eye(2)]
    np.testing.assert_allclose(net.state.model_CP[0], W - 0.1 * np.array(slope), atol=1e-8)


# ---- batches and their number


@pytest.mark.parametrize(("batch", "epochs"), [(10, 2), (25, 5), (1000, 5)])
def test_default_round_takes_as_many_gradient_steps_as_fedavg(network, batch, epochs):
    training = PLAIN.model_copy(update={"batch": batch, "epochs": epochs})
    x = torch.ones(100, 1, dtype=torch.float64)
    steps = [
        network(algorithm, [x], [x], ALONE, training=training).simulator.round(1, ALONE).steps
        for algorithm in (PFedMe(), FedAvg())
    ]
    assert steps[0] == steps[1] == epochs * max(1, 100 // batch)


def test_batch_is_drawn_without_repetition_and_not_by_block(network):
    counts = [7, 3, 20]
    x = [torch.ones(count, 1, dtype=torch.float64) for count in counts]
    net = network(
        PFedMe(), x, x, Graph.from_edges(3, []), training=PLAIN.model_copy(update={"batch": 5})
    )
    batch_CE = draw_batches(net.learner, net.data, net.key)
    assert batch_CE.sum(1).tolist() == [5, 3, 5]
    assert not (batch_CE & ~net.data.present_CE).any()
    part = Block([1, 2], 3, x[1:], x[1:], net.data.width)
    assert torch.equal(draw_batches(net.learner, part, net.key), batch_CE[1:])
    assert not torch.equal(draw_batches(net.learner, net.data, net.key.of("batch", 1)), batch_CE)


# ---- more than parameters


def test_batchnorm_statistics_are_averaged_but_never_extrapolated(network):
    """eta lambda = 7.5 and beta = 4 go beyond theta and the mean.

    That is right for a weight, but a variance would fall below 0.
    """
    x = [0.1 * torch.randn(12, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    y = [torch.arange(12) % 2] * 2
    net = network(
        PFedMe(R=2, lambda_=15, beta=4),
        x,
        y,
        PAIR,
        training=TrainingOptions(lr=0.5, batch=12, epochs=1),
        factory=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)),
        loss=cross_entropy,
        dtype=torch.float32,
    )
    net.run(2)
    for model_P in (*net.state.model_CP, *net.state.personal_CP):
        variance = net.learner.export(model_P)["0.running_var"]
        assert ((variance > 0) & (variance < 1)).all()  # it starts at 1 and falls towards 0.01


# ---- a newcomer


def test_newcomer_takes_the_mean_w_and_finds_its_theta(network):
    """w = (0.2 + 0.8) / 2 = 0.5; theta = 0.5 - 0.1 (0.5 - 10) = 1.45."""
    net = from_zero(network, PFedMe(K=1, R=1, lambda_=2, personal_lr=0.1), 10, 30)
    net.state = replace(net.state, model_CP=column(0.2, 0.8))
    cluster_CK, model_CKP = net.algorithm.share(net.state)
    shared = Exchange(cluster_CK, model_CKP, torch.ones(2, 1), cluster_CK)
    around = Neighbourhood.of(Graph.from_edges(3, [(2, 0), (2, 1)]), [2], shared, np.arange(2))
    state = net.algorithm.join(
        net.learner, Block([2], 3, [column(1)], [column(10)], 1), around, net.key.at(3)
    )
    assert state.model_CP.item() == pytest.approx(0.5)
    assert state.personal_CP.item() == pytest.approx(1.45)
