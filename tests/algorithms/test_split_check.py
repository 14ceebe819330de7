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
    robust_signs,
    share_between_clusters,
)
from fedspd.core.block import Block
from fedspd.core.exchange import Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.learner import Learner
from fedspd.core.robust import ROBUST


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


def judge(feature_N2B, z_NM, mixture_NS, rule: str = "uniform"):
    """Return what judge_split finds for two clusters."""
    n, is_robust = len(z_NM), rule in ROBUST
    nobody, two_N = torch.zeros(n, dtype=torch.bool), torch.full((n,), 2)
    options = {"alone_C": nobody, "is_robust": is_robust}
    return solve(partial(judge_split, feature_N2B, z_NM, mixture_NS, two_N, **options), rule)


@pytest.mark.parametrize("rule", ["uniform", *ROBUST])
@pytest.mark.parametrize(
    ("ends", "change", "kept", "own_bodies"),
    [
        ("mixed", 0.0, True, False),  # only labels differ: no single head can follow both
        ("mixed", 3.0, False, True),  # the features tell the populations apart
        ("pure", 3.0, True, True),  # but no client needs both
        ("pure", 0.0, True, False),
    ],
)
def test_split_is_kept_where_features_are_alike_or_clients_pure(
    ends, change, kept, own_bodies, rule
):
    z_NM, mixture_NS = clients_between(ends)
    found = judge(halves(z_NM, change), z_NM, mixture_NS, rule)
    assert found[0].tolist() == [kept] * 24
    assert found[1].tolist() == [own_bodies] * 24


def test_coordinates_that_are_not_in_use_do_not_count():
    z_NM, mixture_NS = clients_between("mixed")
    more_NM = torch.cat([z_NM, 50 * torch.randn(24, 1, dtype=torch.double)], 1)
    for change, kept in ((0.0, True), (3.0, False)):
        assert judge(halves(z_NM, change), more_NM, mixture_NS)[0].tolist() == [kept] * 24


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
    few = partial(share_between_clusters, z_NM[:2], mixture_NS[:2], two_N[:2])
    assert solve(few).tolist() == [0.0] * 2, "any two points are two clusters"


def test_robust_signs_are_medians_of_differences_to_the_middle_of_the_clusters():
    """Of nine clients one lies, one lacks a half and one is alone: none of them counts much."""
    z_NM = torch.tensor([[-3.0], [-2], [-1], [5], [6], [7], [900], [8], [-8]], dtype=torch.double)
    feature_N2B = z_NM[:, :1, None].repeat(1, 2, 1)  # one feature in each half: the coordinate
    feature_N2B[6] = -1e6
    feature_N2B[7, 1] = torch.nan
    mixture_NS = torch.nn.functional.one_hot((z_NM[:, 0] > 0).long(), 2).double()
    alone_N = torch.arange(9) == 8
    check = partial(robust_signs, feature_N2B, z_NM, mixture_NS, torch.full((9,), 2))
    r_N, share_N = solve(partial(check, alone_C=alone_N), rule="median")
    # centres -2 and (6 + 7) / 2, so that the middle is 2.25; differences to it, and to the centres:
    total = np.median(np.square([-5.25, -4.25, -3.25, 2.75, 3.75, 4.75, 897.75]))
    within = np.median(np.square([1, 0, 1, 1.5, 0.5, 0.5, 893.5]))
    assert share_N.tolist() == pytest.approx([1 - within / 7 / (total / 8)] * 9)
    # features have their centres at -2 and (5 + 6) / 2, and their middle at 1.75
    z = np.array([-5.25, -4.25, -3.25, 2.75, 3.75, 4.75, 897.75])
    feature = np.array([-4.75, -3.75, -2.75, 3.25, 4.25, 5.25, -1e6 - 1.75])
    spread = np.sqrt(np.median(z**2) * np.median(feature**2))
    assert r_N.tolist() == pytest.approx([np.median(z * feature) / spread] * 9)


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
