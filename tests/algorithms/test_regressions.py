"""A mixture of linear regressions over a sparse graph.

Clients that know only their neighbours find the clusters, also if they start with other labels.

Shapes: N clients, S clusters, P = 2 slopes, E examples.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedspd.algorithms.fedspd import FedSPD, cluster_examples, relabelled
from fedspd.core.keys import Key
from fedspd.core.learner import TrainingOptions
from fedspd.core.metrics import CenterMoments, purity, relabelling
from fedspd.topology import TopologyOptions, build_topology

N, E, NOISE = 20, 40, 0.02
TWO = np.array([[2.0, 1.0], [-2.0, 1.0]])
THREE = np.array([[3.0, 0.0], [-1.5, 2.5], [-1.5, -2.5]])
SGD = TrainingOptions(lr=0.2, momentum=0, batch=E, epochs=2, decay=1)


class Regressions:
    """N clients on a graph of degree 3, each with E examples y = slope . x + noise.

    Every client has its own shares of the slopes.
    """

    def __init__(
        self, network, slope_SP: np.ndarray, rule: str = "uniform", seed: int = 0, **options
    ):
        self.rng, self.slope_SP, self.clusters = (
            np.random.default_rng(seed),
            slope_SP,
            len(slope_SP),
        )
        share_NS = self.rng.dirichlet([10] * self.clusters, N)
        self.truth = [self.rng.choice(self.clusters, E, p=share_S) for share_S in share_NS]
        x = [self.rng.normal(size=(E, 2)) for _ in range(N)]
        y = [
            (own * slope_SP[truth]).sum(1, keepdims=True)
            for own, truth in zip(x, self.truth, strict=True)
        ]
        y = [own + NOISE * self.rng.normal(size=own.shape) for own in y]
        graph = build_topology(TopologyOptions(kind="er", degree=3, weights=rule), N, Key(seed)).at(
            1
        )
        tensors = ([torch.from_numpy(own) for own in values] for values in (x, y))
        self.net = network(
            FedSPD(clusters=self.clusters, **options), *tensors, graph, training=SGD, seed=seed
        )

    def table(self) -> np.ndarray:
        table_SD = np.zeros((self.clusters, self.clusters), np.int64)
        for assigned, truth in zip(self.net.state.assignment_CE.numpy(), self.truth, strict=True):
            np.add.at(table_SD, (assigned, truth), 1)
        return table_SD

    def distance(self) -> float:
        return CenterMoments.of(self.net.state.centers_CSP.numpy()).consensus_distance().max()

    def worst_error(self) -> float:
        """Return the largest error of any center, under the labels of the network as a whole."""
        return np.abs(
            self.net.state.centers_CSP.numpy() - self.slope_SP[relabelling(self.table())]
        ).max()

    def start_near_the_truth(self) -> None:
        """Put all centers about 0.5 from the truth, as after some rounds, and assign examples."""
        centers_NSP = torch.from_numpy(
            self.slope_SP + 0.5 * self.rng.normal(size=(N, self.clusters, 2))
        )
        state = replace(
            self.net.state,
            centers_CSP=centers_NSP,
            trained_CS=torch.ones(N, self.clusters, dtype=torch.bool),
        )
        self.net.state = cluster_examples(self.net.learner, state, self.net.data)

    def rename(self, label_NS: list[np.ndarray]) -> None:
        """Client i calls its cluster s label_NS[i][s] from now on."""
        self.net.state = relabelled(
            self.net.state, torch.from_numpy(np.stack(label_NS)), self.net.state.note_C
        )

    def assert_solved(self, start: float) -> None:
        assert purity(self.table()) > 0.99
        assert self.distance() < start / 100
        assert self.worst_error() < NOISE

    def assert_all_follow_client_0(self) -> None:
        assert (
            self.net.state.note_C < N
        ).all()  # no client's labels come from another, and none is N hops away
        difference_NSS = torch.cdist(
            self.net.state.centers_CSP, self.net.state.centers_CSP[:1].expand(N, -1, -1)
        )
        assert (difference_NSS.argmin(2) == torch.arange(self.clusters)).all()


@pytest.mark.parametrize("rule", ["uniform", "metropolis"])
def test_clients_find_two_regressions_and_agree_on_them(network, rule):
    problem = Regressions(network, TWO, rule, init="own")
    start = problem.distance()
    problem.net.run(100)
    problem.assert_solved(start)


def test_equal_first_models_separate_and_agree(network):
    """With init = cluster all agree at first, so the distance to fall from is that of round 10."""
    problem = Regressions(network, TWO)
    assert problem.distance() == pytest.approx(0, abs=1e-15)
    problem.net.run(10)
    start = problem.distance()
    problem.net.run(100, first=11)
    problem.assert_solved(start)


@pytest.mark.parametrize("align_every", [5, 10])
def test_alignment_restores_clients_that_start_with_switched_centers(network, align_every):
    problem = Regressions(network, TWO, align_every=align_every)
    problem.rename([np.array([1, 0]) if i % 2 else np.array([0, 1]) for i in range(N)])
    start = problem.distance()
    problem.net.run(100)
    problem.assert_solved(start)
    problem.assert_all_follow_client_0()


def test_alignment_gives_three_clusters_the_labels_of_client_0(network):
    problem = Regressions(network, THREE, align_every=1)
    problem.start_near_the_truth()
    problem.rename([problem.rng.permutation(3) for _ in range(N)])
    start = problem.distance()
    problem.net.run(100)
    problem.assert_solved(start)
    problem.assert_all_follow_client_0()
