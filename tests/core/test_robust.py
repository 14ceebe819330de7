"""Robust means, by hand and on random models with one Byzantine neighbour.

Shapes: R rows, H models received, N clients, P parameters of a model.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspd.core import exchange
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.robust import ROBUST, aggregate, clipped, median, trimmed

seeds = st.integers(0, 2**32)
rules = st.sampled_from(sorted(ROBUST))


def column(*numbers: float) -> torch.Tensor:
    """Models of one parameter each, received by one client."""
    return torch.tensor(numbers, dtype=torch.float64)[None, :, None]


def own(place: int | None, received: int) -> torch.Tensor:
    return torch.tensor([[h == place for h in range(received)]])


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        ((3,), 3),
        ((3, 9), 6),
        ((1, 9, 2), 2),
        ((1, 2, 4, 1e6), 3),
        ((torch.nan, 1, 2), 2),
        ((-torch.inf, 1, 2), 1),
    ],
)
def test_median_equals_numbers_worked_by_hand(received, expected):
    assert median(column(*received), own(0, len(received))).item() == expected


def test_median_is_taken_of_every_coordinate():
    model_RHP = torch.tensor([[[1.0, 9.0], [2.0, 7.0], [3.0, 8.0]]])
    assert median(model_RHP, own(0, 3)).tolist() == [[2.0, 8.0]]


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        ((1, 9, 2), 2),
        ((1, 2, 4, 1e6), 3),
        ((0, 3, 4, 5, 1e6), 4),
        ((-1e6, -9, 1, 2, 3, 4, 9, 1e6), 2.5),
    ],
)
def test_trimmed_mean_equals_numbers_worked_by_hand(received, expected):
    """Of eight, two on each side are left out."""
    assert trimmed(column(*received), own(0, len(received))).item() == expected


def test_clipping_shortens_differences_above_the_median_length():
    """From 10 the others are 1, 2 and 90 away.

    The last one becomes 12, and the mean is (10 + 11 + 12 + 12) / 4.
    """
    assert clipped(column(11, 12, 10, 100), own(2, 4)).item() == 11.25


def test_clipping_of_an_even_number_takes_the_shorter_middle_length():
    """10, 11 and 100: the middle of the lengths 1 and 90 is 1, so (10 + 11 + 11) / 3."""
    assert clipped(column(10, 11, 100), own(0, 3)).item() == pytest.approx(32 / 3)


@pytest.mark.parametrize("rule", sorted(ROBUST))
def test_robust_means_of_two_models_keep_the_own_one(rule):
    """Of two, no rule can tell which one is false; a newcomer has no own model to keep."""
    assert aggregate(rule, column(10, 3e38), own(0, 2)).item() == 10
    assert aggregate(rule, column(-30, 10), own(1, 2)).item() == 10
    assert aggregate(rule, column(10), own(0, 1)).item() == 10
    assert aggregate(rule, column(10, 20), own(None, 2)).item() == 15


@pytest.mark.parametrize("rule", sorted(ROBUST))
def test_clients_of_a_complete_graph_keep_their_own_of_two_models(rule):
    """Clients 0 and 3 have cluster 0, the other three have cluster 1, and all want both."""
    graph, model_N1P = Graph.complete(5, rule), torch.tensor([1.0, 2, 3, 9, 4])[:, None, None]
    cluster_N1, want_NM = torch.tensor([[0], [1], [1], [0], [1]]), torch.arange(2).repeat(5, 1)
    offers = Exchange(cluster_N1, model_N1P, torch.ones(5, 1), want_NM)
    for clients in ([0, 1, 2, 3, 4], [3], [0, 3]):
        mean = Neighbourhood.of(graph, clients, offers).mean(want_NM[clients]).model_CMP[:, :, 0]
        for row, client in zip(mean.tolist(), clients, strict=True):
            assert row[0] == {0: 1.0, 3: 9.0}.get(client, 5.0)  # the others have none of their own
            assert 2 < row[1] < 4  # of three models, by the rule


@pytest.mark.parametrize("rule", sorted(ROBUST))
@pytest.mark.parametrize("is_complete", [True, False])
def test_client_keeps_a_center_that_it_did_not_offer_where_fewer_than_three_did(rule, is_complete):
    """Clients 0 and 3 offer cluster 0, the others cluster 1; a newcomer offers nothing."""
    pairs = [(i, j) for i in range(6) for j in range(i)]
    graph = Graph.complete(6, rule) if is_complete else Graph.from_edges(6, pairs[1:], rule)
    cluster_N1 = torch.tensor([[0], [1], [1], [0], [1], [-1]])
    model_N1P = torch.tensor([1.0, 2, 3, 1e6, 4, 0])[:, None, None]
    offers = Exchange(cluster_N1, model_N1P, torch.ones(6, 1), torch.arange(2).repeat(6, 1))
    centers_CSP = torch.full((6, 2, 1), 7.0)
    for clients in ([2, 3, 4, 5], [4], [5]):
        neighbourhood = Neighbourhood.of(graph, clients, offers)
        found = neighbourhood.average_centers(centers_CSP[clients])[:, :, 0].tolist()
        for (rare, common), client in zip(found, clients, strict=True):
            assert rare == {3: 1e6, 5: (1 + 1e6) / 2}.get(client, 7)  # a newcomer has none to keep
            assert 2 <= common <= 4


@pytest.mark.parametrize("rule", sorted(ROBUST))
def test_unmade_offer_of_a_complete_graph_is_no_own_model(rule):
    """Clients 1 and 2 offer nothing; 0 and 1 want nothing."""
    cluster_N1, want_N1 = torch.tensor([[0], [-1], [-1]]), torch.tensor([[-1], [-1], [0]])
    offers = Exchange(cluster_N1, torch.tensor([[[4.0]], [[5]], [[6]]]), torch.ones(3, 1), want_N1)
    mean = Neighbourhood.of(Graph.complete(3, rule), range(3), offers).mean(want_N1)
    assert mean.model_CMP.flatten().tolist() == [0, 0, 4]
    assert mean.received_CM.flatten().tolist() == [False, False, True]


def test_clipping_without_an_own_model_starts_from_the_median():
    """Of 1, 2 and 30 the median is 2; the lengths are 1, 0 and 28: (1 + 2 + 3) / 3."""
    assert clipped(column(1, 2, 30), own(None, 3)).item() == 2


def test_clipping_ignores_values_that_are_not_numbers():
    """As if it were the client's own: (10 + 10 + 12) / 3, even if most values are such."""
    assert clipped(column(10, torch.nan, 12), own(0, 3)).item() == pytest.approx(32 / 3)
    assert clipped(column(10, torch.nan, 12, torch.nan), own(0, 4)).item() == 10.5


@pytest.mark.parametrize("rule", sorted(ROBUST))
@given(
    seed=seeds, lie=st.sampled_from([1e6, -1e6]), P=st.integers(1, 6), byzantine=st.integers(0, 4)
)
def test_robust_means_resist_one_byzantine_neighbour_of_five(rule, seed, lie, P, byzantine):
    """Honest models lie within 1 of each other in every coordinate, and so does the mean."""
    rng = np.random.default_rng(seed)
    model_RHP = torch.from_numpy(rng.random((1, 6, P)))
    model_RHP[0, 1 + byzantine] = lie
    honest_HP = torch.cat([model_RHP[0, : 1 + byzantine], model_RHP[0, 2 + byzantine :]])
    mean_P = ROBUST[rule](model_RHP, own(0, 6))[0]
    if rule == "clipped":
        furthest = torch.linalg.vector_norm(honest_HP - honest_HP[0], dim=1).max()
        assert torch.linalg.vector_norm(mean_P - honest_HP[0]) <= furthest + 1e-12
    else:
        assert (
            (honest_HP.min(0).values - 1e-12 <= mean_P)
            & (mean_P <= honest_HP.max(0).values + 1e-12)
        ).all()
    assert (model_RHP[0].mean(0) - honest_HP.mean(0)).abs().min() > 1e5


def offered(
    rng: np.random.Generator, n: int, clusters: int, P: int, dtype: torch.dtype
) -> Exchange:
    cluster_N1 = torch.from_numpy(rng.integers(0, clusters, (n, 1)))
    model_N1P = torch.from_numpy(rng.normal(size=(n, 1, P))).to(dtype)
    return Exchange(cluster_N1, model_N1P, torch.ones(n, 1), torch.arange(clusters).expand(n, -1))


@given(seeds, st.integers(1, 12), rules)
def test_robust_mean_covers_what_each_client_receives_of_each_cluster(seed, n, rule):
    rng = np.random.default_rng(seed)
    graph = Graph.from_edges(
        n, [(i, j) for i in range(n) for j in range(i) if rng.random() < 0.5], rule
    )
    offers = offered(rng, n, 2, 3, torch.float64)
    mean = Neighbourhood.of(graph, range(n), offers).mean(offers.want_CM)
    for i, s in itertools.product(range(n), range(2)):
        received = [j for j in graph.closed(i).tolist() if offers.cluster_CK[j, 0] == s]
        assert bool(mean.received_CM[i, s]) == bool(received)
        if received:
            expected = aggregate(
                rule,
                offers.model_CKP[received, 0][None],
                torch.tensor([[j == i for j in received]]),
            )
            assert torch.equal(mean.model_CMP[i, s], expected[0])


@pytest.mark.parametrize("rule", sorted(ROBUST))
def test_robust_mean_has_the_same_bits_in_chunks_of_any_size(rule, monkeypatch):
    """Few rows are computed at a time where models are large; here, where they have 3 numbers."""
    rng = np.random.default_rng(0)
    edges = [(i, j) for i in range(9) for j in range(i) if rng.random() < 0.6]
    offers = offered(rng, 9, 2, 3, torch.float32)
    neighbourhood = Neighbourhood.of(Graph.from_edges(9, edges, rule), range(9), offers)
    at_once = neighbourhood.mean(offers.want_CM).model_CMP
    for elements in (1, 20, 50):
        monkeypatch.setattr(exchange, "MAX_ELEMENTS", elements)
        assert torch.equal(neighbourhood.mean(offers.want_CM).model_CMP, at_once)


def test_robust_mean_of_equal_models_is_that_model():
    for rule in ROBUST.values():
        assert rule(column(*[7.0] * 5), own(1, 5)).item() == 7
