"""Which splits are kept, with all clients at hand.

Shapes: N clients, F folds, B features, M coordinates, S clusters.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedspd.algorithms.split_check import (
    correlation_with_features,
    features_of_halves,
    judge_split,
    share_between_clusters,
)
from fedspd.core.block import Block
from fedspd.core.exchange import Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.learner import Learner


def solve(check, rule: str = "uniform"):
    """Return what a check finds on the complete graph of all clients: `check` lacks the block."""
    n = len(check.args[0])
    graph, one = Graph.complete(n, rule), [torch.zeros(1, 1)] * n
    data = Block(range(n), n, one, one, 1, rounds=10, diameter=1)
    generator = check(data)
    asked = next(generator)
    while True:
        try:
            asked = generator.send(Neighbourhood.of(graph, data.clients, asked))
        except StopIteration as end:
            return end.value


def clients_between(ends: str, n: int = 24, seed: int = 0):
    """Return z_NM and mixture_NS of clients at two corners, or anywhere between them."""
    share_N = np.arange(n) % 2 if ends == "pure" else np.linspace(0.1, 0.9, n)
    z_N = 2 * share_N - 1 + 0.05 * np.random.default_rng(seed).normal(size=n)
    near_N = torch.tensor(z_N > 0, dtype=torch.double)
    return torch.tensor(z_N)[:, None], torch.stack([near_N, 1 - near_N], 1)


def halves(z_NM, change: float, seed: int = 1, B: int = 8):
    """Return the mean features of two halves: chance, and a change along the first coordinate."""
    draws = torch.Generator().manual_seed(seed)
    chance_N2B = torch.randn(len(z_NM), 2, B, generator=draws, dtype=torch.double)
    return chance_N2B + change * z_NM[:, :1, None]


@pytest.mark.parametrize(
    ("ends", "change", "kept", "own_bodies"),
    [
        ("mixed", 0.0, True, False),  # only labels differ: no single head can follow both
        ("mixed", 3.0, False, True),  # the features tell the populations apart
        ("pure", 3.0, True, True),  # but no client needs both
        ("pure", 0.0, True, False),
    ],
)
def test_split_is_kept_where_features_are_alike_or_clients_pure(ends, change, kept, own_bodies):
    z_NM, mixture_NS = clients_between(ends)
    check = partial(judge_split, halves(z_NM, change), z_NM, mixture_NS, torch.full((24,), 2))
    found = solve(check)
    assert found[0].tolist() == [kept] * 24
    assert found[1].tolist() == [own_bodies] * 24


def test_coordinates_that_are_not_in_use_do_not_count():
    z_NM, mixture_NS = clients_between("mixed")
    more_NM = torch.cat([z_NM, 50 * torch.randn(24, 1, dtype=torch.double)], 1)
    two_N = torch.full((24,), 2)
    for change, kept in ((0.0, True), (3.0, False)):
        check = partial(judge_split, halves(z_NM, change), more_NM, mixture_NS, two_N)
        assert solve(check)[0].tolist() == [kept] * 24


def test_correlation_is_that_of_the_other_half_along_the_change_of_one():
    z_NM = torch.tensor([[-1.0], [1.0], [-1.0], [1.0]], dtype=torch.double)
    first = torch.tensor([[0.0, 0], [2, 0], [0, 0], [2, 0]])  # changes along (1, 0)
    second = torch.tensor([[0.0, 5], [2, 5], [0, 1], [0, 1]])  # changes along (1, 0) as well
    feature_N2B = torch.stack([first, second], 1).double()
    one, two = 1.0, np.corrcoef([0, 2, 0, 0], [-1, 1, -1, 1])[0, 1]
    expected = (one + two) / 2
    found = solve(partial(correlation_with_features, feature_N2B, z_NM))
    assert found.tolist() == pytest.approx([expected] * 4)
    without = torch.cat([feature_N2B, torch.full((1, 2, 2), torch.nan)])
    more_NM = torch.cat([z_NM, torch.tensor([[7.0]])])
    found = solve(partial(correlation_with_features, without, more_NM))
    assert found.tolist() == pytest.approx([expected] * 5), "a client without a half"


def test_correlation_of_chance_is_small():
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        z_NM = torch.tensor(rng.normal(size=(50, 2)))
        feature_N2B = torch.tensor(rng.normal(size=(50, 2, 6)) * [9, 1, 1, 1, 1, 1])
        found.append(float(solve(partial(correlation_with_features, feature_N2B, z_NM))[0]))
    assert abs(np.mean(found)) < 3 * np.std(found) / np.sqrt(200)
    assert np.std(found) < 1 / np.sqrt(50)


def test_share_between_clusters_is_the_adjusted_r2():
    z_NM = torch.tensor([[-3.0], [-1.0], [1.0], [3.0]], dtype=torch.double)
    mixture_NS = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.0, 1.0]])
    two_N = torch.full((4,), 2)

    share = partial(share_between_clusters, z_NM, mixture_NS, two_N)
    # within 4 of 20, with 2 and 3 degrees of freedom
    assert solve(share).tolist() == pytest.approx([1 - (4 / 2) / (20 / 3)] * 4)
    assert solve(share, rule="median").tolist() == [0.0] * 4
    few = partial(share_between_clusters, z_NM[:2], mixture_NS[:2], two_N[:2])
    assert solve(few).tolist() == [0.0] * 2, "any two points are two clusters"


def test_features_are_what_the_head_sees_by_half():
    body = nn.Linear(2, 2, bias=False)
    learner = Learner(lambda: nn.Sequential(body, nn.ReLU(), nn.Linear(2, 3)))
    model_CP = torch.zeros(1, learner.size)
    model_CP[0, :4] = torch.tensor([1.0, 0, 0, 1])  # the body is the identity
    x = torch.tensor([[1.0, 2], [3, -4], [5, 6]])
    data = Block([0], 1, [x], [torch.zeros(3, dtype=torch.long)], 4)
    only_CFE = torch.zeros(1, 4, 4, dtype=torch.bool)
    only_CFE[0, 0, 0] = only_CFE[0, 2, 1] = only_CFE[0, 3, 2] = True
    found = features_of_halves(learner, model_CP, only_CFE, data)
    assert found.tolist() == [[[2.0, 1.0], [5.0, 6.0]]], "means of folds 0 and 2, and of 1 and 3"
    nothing = torch.zeros_like(only_CFE)
    assert features_of_halves(learner, model_CP, nothing, data).isnan().all()
