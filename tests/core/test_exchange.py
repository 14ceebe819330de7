"""Means against a dense, obvious reference, by blocks, and Lemma A.1 on the mixing matrix.

Shapes: N clients, K models offered by each, M clusters wanted by each, P parameters of a model.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspd.core.exchange import Exchange, Neighbourhood, mixing_matrix
from fedspd.core.graph import Graph
from fedspd.core.ledger import NO_CLUSTER
from fedspd.core.robust import ROBUST

seeds = st.integers(0, 2**32)
RULES = ["uniform", "metropolis", "examples"]
rules, all_rules = st.sampled_from(RULES), st.sampled_from([*RULES, *sorted(ROBUST)])


def random_graph(rng: np.random.Generator, n: int, rule: str) -> Graph:
    chance = rng.random()
    return Graph.from_edges(
        n, [(i, j) for i in range(n) for j in range(i) if rng.random() < chance], rule
    )


def random_offers(
    rng: np.random.Generator, n: int, clusters: int, K: int, M: int, P: int = 5
) -> Exchange:
    """Every client offers K different clusters and wants M, some of which may not be offered."""
    cluster_NK = np.stack([rng.permutation(clusters)[:K] for _ in range(n)])
    want_NM = rng.integers(0, clusters + 1, (n, M))
    weight_NK = rng.integers(1, 100, (n, K))
    model_NKP = rng.normal(size=(n, K, P))
    return Exchange(
        *(torch.from_numpy(part) for part in (cluster_NK, model_NKP, weight_NK, want_NM))
    )


def rows(offers: Exchange, which: Any) -> Exchange:
    return Exchange(
        offers.cluster_CK[which],
        offers.model_CKP[which],
        offers.weight_CK[which],
        offers.want_CM[which],
    )


def everyone_offers(cluster_N: Any, model_NP: Any) -> Exchange:
    cluster_N1 = torch.as_tensor(cluster_N)[:, None]
    return Exchange(
        cluster_N1, torch.as_tensor(model_NP)[:, None], torch.ones_like(cluster_N1), cluster_N1
    )


def dense_mean(
    graph: Graph, offers: Exchange, i: int, s: int, speaking: set[int]
) -> np.ndarray | None:
    """Client i's mean of cluster s, one neighbour after the other. None: not offered."""
    received: list[tuple[int, float, np.ndarray]] = []
    for j in graph.closed(i).tolist():
        for k in range(offers.cluster_CK.shape[1]):
            if j in speaking and offers.cluster_CK[j, k] == s:
                received.append((j, float(offers.weight_CK[j, k]), offers.model_CKP[j, k].numpy()))
    if not received:
        return None
    if graph.rule == "uniform":
        weight = [1.0 for _ in received]
    elif graph.rule == "examples":
        weight = [examples for _, examples, _ in received]
    else:
        weight = [
            1 / (1 + max(graph.degree[i], graph.degree[j])) if j != i else 0.0
            for j, _, _ in received
        ]
        weight = [
            1 - sum(weight) if j == i else w for (j, _, _), w in zip(received, weight, strict=True)
        ]
    return sum(w * model for w, (_, _, model) in zip(weight, received, strict=True)) / sum(weight)


@given(seeds, st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), rules)
def test_mean_equals_a_dense_loop_over_neighbours_and_models(seed, n, clusters, M, rule):
    rng = np.random.default_rng(seed)
    graph, offers = (
        random_graph(rng, n, rule),
        random_offers(rng, n, clusters, int(rng.integers(1, clusters + 1)), M),
    )
    mean = Neighbourhood.of(graph, range(n), offers).mean(offers.want_CM)
    for i in range(n):
        for m in range(M):
            expected = dense_mean(graph, offers, i, int(offers.want_CM[i, m]), set(range(n)))
            assert bool(mean.received_CM[i, m]) == (expected is not None)
            np.testing.assert_allclose(
                mean.model_CMP[i, m], 0.0 if expected is None else expected, atol=1e-12
            )


@given(seeds, st.integers(2, 12), st.integers(1, 3), rules)
def test_mean_leaves_silent_clients_out(seed, n, clusters, rule):
    """A neighbour may be down, and the client itself may have nothing to offer yet."""
    rng = np.random.default_rng(seed)
    graph, offers = random_graph(rng, n, rule), random_offers(rng, n, clusters, 1, 2)
    i = int(rng.integers(n))
    speaking = np.flatnonzero(rng.random(n) < 0.5)
    mean = Neighbourhood.of(graph, [i], rows(offers, speaking), speaking).mean(offers.want_CM[[i]])
    for m in range(2):
        expected = dense_mean(graph, offers, i, int(offers.want_CM[i, m]), set(speaking.tolist()))
        assert bool(mean.received_CM[0, m]) == (expected is not None)
        np.testing.assert_allclose(
            mean.model_CMP[0, m], 0.0 if expected is None else expected, atol=1e-12
        )


@given(
    seeds,
    st.integers(2, 25),
    st.integers(1, 3),
    all_rules,
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 5, 300]),
)
def test_mean_has_the_same_bits_for_any_partition_into_blocks(seed, n, clusters, rule, dtype, P):
    rng = np.random.default_rng(seed)
    graph, offers = random_graph(rng, n, rule), random_offers(rng, n, clusters, 1, 2, P)
    offers = Exchange(
        offers.cluster_CK, offers.model_CKP.to(dtype), offers.weight_CK, offers.want_CM
    )
    whole = Neighbourhood.of(graph, range(n), offers).mean(offers.want_CM)
    cuts = [
        0,
        *sorted(rng.choice(np.arange(1, n), int(rng.integers(n)), replace=False).tolist()),
        n,
    ]
    for low, high in itertools.pairwise(cuts):
        part = Neighbourhood.of(graph, range(low, high), offers).mean(offers.want_CM[low:high])
        assert torch.equal(part.model_CMP, whole.model_CMP[low:high])
        assert torch.equal(part.received_CM, whole.received_CM[low:high])


@given(
    seeds,
    st.integers(1, 20),
    st.integers(1, 3),
    all_rules,
)
def test_complete_graph_gives_the_bits_of_one_that_lists_every_edge(seed, n, clusters, rule):
    """One mean per cluster serves all clients; silent ones are left out of it."""
    rng = np.random.default_rng(seed)
    listed = Graph.from_edges(n, [(i, j) for i in range(n) for j in range(i)], rule)
    offers = random_offers(rng, n, clusters, int(rng.integers(1, clusters + 1)), 2)
    clients, speaking = (
        np.sort(rng.permutation(n)[: rng.integers(1, n + 1)]).tolist(),
        np.flatnonzero(rng.random(n) < 0.7),
    )
    for ids in (None, speaking):
        received = offers if ids is None else rows(offers, ids)
        first, second = (
            Neighbourhood.of(graph, clients, received, ids)
            for graph in (Graph.complete(n, rule), listed)
        )
        for found, expected in zip(
            first.mean(offers.want_CM[clients]), second.mean(offers.want_CM[clients]), strict=True
        ):
            assert torch.equal(found, expected)
        for c in range(len(clients)):
            assert [other[:3] for other in first.received(c)] == [
                other[:3] for other in second.received(c)
            ]


@pytest.mark.parametrize("rule", ["uniform", "metropolis", "examples"])
def test_client_alone_gets_the_bits_that_it_gets_in_a_block(rule):
    """Many rows have 8, 16 or 24 links, where one more term would reorder a pairwise sum."""
    n = 30
    for seed in range(10):
        rng = np.random.default_rng(seed)
        graph, offers = (
            random_graph(rng, n, rule),
            everyone_offers(np.zeros(n, dtype=np.int64), rng.normal(size=(n, 3))),
        )
        whole = Neighbourhood.of(graph, range(n), offers).mean(offers.want_CM).model_CMP
        alone = [
            Neighbourhood.of(graph, [i], offers).mean(offers.want_CM[[i]]).model_CMP
            for i in range(n)
        ]
        assert torch.equal(torch.cat(alone), whole)


@given(seeds, st.integers(1, 15), st.integers(1, 4), rules)
def test_mixing_matrix_rows_with_an_entry_sum_to_one(seed, n, clusters, rule):
    rng = np.random.default_rng(seed)
    offers = random_offers(rng, n, clusters, 1, 3)
    neighbourhood = Neighbourhood.of(random_graph(rng, n, rule), range(n), offers)
    matrix = mixing_matrix(neighbourhood, offers.want_CM).toarray()
    received = neighbourhood.mean(offers.want_CM).received_CM.flatten().numpy()
    assert (matrix >= -1e-15).all()
    np.testing.assert_allclose(matrix.sum(1), received.astype(float), atol=1e-14)


@given(seeds, st.integers(1, 15), st.integers(1, 3))
def test_metropolis_is_doubly_stochastic_and_keeps_the_mean_of_every_cluster(seed, n, clusters):
    """Lemma A.1 holds for any set of clients that chose the same cluster."""
    rng = np.random.default_rng(seed)
    offers = everyone_offers(rng.integers(0, clusters, n), rng.normal(size=(n, 4)))
    neighbourhood = Neighbourhood.of(random_graph(rng, n, "metropolis"), range(n), offers)
    matrix = mixing_matrix(neighbourhood, offers.want_CM).toarray()
    np.testing.assert_allclose(matrix.sum(0), 1.0, atol=1e-14)
    np.testing.assert_allclose(matrix.sum(1), 1.0, atol=1e-14)
    after = neighbourhood.mean(offers.want_CM).model_CMP
    for s in range(clusters):
        chose_s = offers.cluster_CK[:, 0] == s
        torch.testing.assert_close(
            after[chose_s].sum(0), offers.model_CKP[chose_s].sum(0), rtol=0, atol=1e-12
        )


def test_uniform_weights_on_a_path_do_not_keep_the_mean():
    """Why `metropolis` exists: 0 - 1 - 2 with models 3, 0, 0 becomes 3/2, 1, 0."""
    graph = Graph.from_edges(3, [(0, 1), (1, 2)])
    offers = everyone_offers([0, 0, 0], torch.tensor([[3.0], [0.0], [0.0]], dtype=torch.float64))
    mean = Neighbourhood.of(graph, range(3), offers).mean(offers.want_CM).model_CMP
    torch.testing.assert_close(mean.flatten(), torch.tensor([1.5, 1.0, 0.0], dtype=torch.float64))


def test_examples_rule_weighs_by_the_examples_behind_a_model():
    """Client 0 has 1 example behind 4.0, client 1 has 3 behind 8.0: (4 + 24) / 4 = 7."""
    graph = Graph.from_edges(2, [(0, 1)], "examples")
    zero = torch.zeros(2, 1, dtype=torch.long)
    offers = Exchange(zero, torch.tensor([[[4.0]], [[8.0]]]), torch.tensor([[1], [3]]), zero)
    assert Neighbourhood.of(graph, range(2), offers).mean(zero).model_CMP.flatten().tolist() == [
        7.0,
        7.0,
    ]


def test_examples_rule_weighs_models_without_examples_equally():
    graph = Graph.from_edges(2, [(0, 1)], "examples")
    zero = torch.zeros(2, 1, dtype=torch.long)
    offers = Exchange(zero, torch.tensor([[[4.0]], [[8.0]]]), zero, zero)
    assert Neighbourhood.of(graph, range(2), offers).mean(zero).model_CMP.flatten().tolist() == [
        6.0,
        6.0,
    ]


def test_mean_marks_a_cluster_that_no_one_offered_as_not_received():
    offers = everyone_offers([0, 1], torch.ones(2, 1))
    mean = Neighbourhood.of(Graph.from_edges(2, []), range(2), offers).mean(
        torch.tensor([[0, 1], [0, 1]])
    )
    assert mean.received_CM.tolist() == [[True, False], [False, True]]
    assert mean.model_CMP.flatten().tolist() == [1.0, 0.0, 0.0, 1.0]


def test_received_yields_the_models_of_others_with_their_notes():
    graph = Graph.from_edges(3, [(0, 1), (1, 2)])
    offers = Exchange(
        torch.tensor([[0], [1], [0]]),
        torch.arange(3.0)[:, None, None],
        torch.ones(3, 1),
        torch.zeros(3, 1),
        torch.tensor([5, 6, 7]),
    )
    received = [
        (other.client, other.note, other.cluster, other.model_P.item())
        for other in Neighbourhood.of(graph, [1], offers).received(0)
    ]
    assert received == [(0, 5, 0, 0.0), (2, 7, 0, 2.0)]


def test_received_omits_unwanted_and_missing_models():
    """Client 2 takes part in the exchange without a model.

    It announced one, but nothing came of it.
    """
    graph = Graph.from_edges(3, [(0, 1), (0, 2)])
    offers = everyone_offers([0, 1, NO_CLUSTER], torch.ones(3, 1))
    assert list(Neighbourhood.of(graph, [0], offers).received(0)) == []
    listening = replace(offers, want_CM=torch.tensor([[0, 1], [1, NO_CLUSTER], [0, NO_CLUSTER]]))
    assert [
        (other.client, other.cluster)
        for other in Neighbourhood.of(graph, [0], listening).received(0)
    ] == [(1, 1)]


def test_received_omits_missing_models_where_a_client_wants_fewer_clusters_than_others():
    """Client 0 wants one cluster and a newcomer all: neither gets the offer that client 2 has not.

    A table of wants has one width, so that it is filled up with NO_CLUSTER.
    """
    graph = Graph.from_edges(4, [(0, 1), (0, 2), (3, 1), (3, 2)])
    offers = replace(
        everyone_offers([0, 1, NO_CLUSTER], torch.ones(3, 1)),
        want_CM=torch.tensor([[1, NO_CLUSTER], [0, 1], [0, 1]]),
    )
    received = Neighbourhood.of(graph, [0, 3], offers, np.arange(3))
    for c in range(2):
        assert [(other.client, other.cluster) for other in received.received(c)] == [(1, 1)]


def test_newcomer_receives_every_cluster():
    """Also one that no client wants."""
    graph = Graph.from_edges(3, [(0, 2), (1, 2)])
    offers = replace(everyone_offers([0, 1], torch.ones(2, 1)), want_CM=torch.zeros(2, 1))
    assert [
        other.cluster for other in Neighbourhood.of(graph, [2], offers, np.arange(2)).received(0)
    ] == [0, 1]


def test_largest_is_an_offer_that_was_made_and_of_equal_ones_that_with_the_least_second_number():
    """Client 1 offers nothing: its zeros are above all numbers that were offered."""
    numbers = torch.tensor([[-3.0, 1.0], [0.0, 0.0], [-2.0, 5.0], [-2.0, 4.0]])
    offers = everyone_offers([0, NO_CLUSTER, 0, 0], numbers)
    path = Graph.from_edges(4, [(0, 1), (1, 2), (2, 3)])
    found = [Neighbourhood.of(graph, range(4), offers) for graph in (Graph.complete(4), path)]
    assert found[0].largest().tolist() == [[-2.0, 4.0]] * 4
    assert found[1].largest().tolist() == [[-3.0, 1.0], [-2.0, 5.0], [-2.0, 4.0], [-2.0, 4.0]]
