"""A node's neighbourhood equals that of a simulated client, to the bit.

Shapes: C clients, N senders, K offers, M wanted clusters, P parameters of a model.
"""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph, LinkRule
from fedspd.node.peer.answers import (
    Answer,
    build_announcement,
    build_neighbourhood,
    clusters_to_fetch,
    select_models,
)
from fedspd.node.peer.inbox import ExchangeId
from fedspd.node.wire.messages import Request


def draw_exchange(seed: int, n: int, K: int, S: int, P: int = 3) -> Exchange:
    """Return the exchange of n clients that offer one cluster each (K = 1), or all of them."""
    generator = torch.Generator().manual_seed(seed)
    one_each = torch.randint(S, (n, 1), generator=generator)
    cluster_NK = one_each if K == 1 else torch.arange(S).repeat(n, 1)
    K = cluster_NK.shape[1]
    weight_NK = torch.randint(1, 9, (n, K), generator=generator).double()
    model_NKP = torch.randn(n, K, P, generator=generator)
    return Exchange(cluster_NK, model_NKP, weight_NK, cluster_NK, torch.arange(n))


def row(exchange: Exchange, i: int) -> Exchange:
    """Return client i's part of an exchange."""
    assert exchange.note_C is not None
    return Exchange(
        exchange.cluster_CK[i : i + 1],
        exchange.model_CKP[i : i + 1],
        exchange.weight_CK[i : i + 1],
        exchange.want_CM[i : i + 1],
        exchange.note_C[i : i + 1],
    )


def neighbourhood_of(i: int, graph: Graph, exchange: Exchange) -> Neighbourhood:
    """Return client i's neighbourhood as a node builds it from its neighbours' messages."""
    own, answers = row(exchange, i), []
    for j in graph.neighbours(i).tolist():
        degree = int(graph.degree[j])
        announcement = build_announcement(ExchangeId(1, 0), row(exchange, j), degree, graph.rule)
        request = Request(1, 0, clusters_to_fetch(own, announcement), 3)
        offer = select_models(list(announcement.clusters), exchange.model_CKP[j], request)
        answers.append(Answer(j, announcement, offer))
    return build_neighbourhood(i, own, answers, int(graph.degree[i]), graph.rule)


@given(
    seed=st.integers(0, 1000),
    n=st.integers(1, 7),
    K=st.sampled_from([1, 2]),
    S=st.integers(1, 3),
    rule=st.sampled_from(["uniform", "metropolis", "examples"]),
)
def test_neighbourhood_and_its_mean_equal_the_simulator_to_the_bit(
    seed: int, n: int, K: int, S: int, rule: LinkRule
) -> None:
    generator = np.random.default_rng(seed)
    edges = [(i, j) for i in range(n) for j in range(i) if generator.random() < 0.5]
    graph = Graph.from_edges(n, edges, rule)
    exchange = draw_exchange(seed, n, K, S)
    for i in range(n):
        want_CM = exchange.want_CM[i : i + 1]
        expected = Neighbourhood.of(graph, [i], exchange)
        actual = neighbourhood_of(i, graph, exchange)
        for one, other in zip(actual.mean(want_CM), expected.mean(want_CM), strict=True):
            assert torch.equal(one, other)
        for one, other in zip(actual.received(0), expected.received(0), strict=True):
            assert one[:3] == other[:3]
            assert torch.equal(one.model_P, other.model_P)


def test_node_fetches_only_the_clusters_that_it_wants() -> None:
    clusters = torch.tensor([[0], [1]])
    exchange = Exchange(clusters, torch.ones(2, 1, 3), torch.ones(2, 1), clusters, torch.zeros(2))
    announcement = build_announcement(ExchangeId(4, 1), row(exchange, 1), 5, "uniform")
    assert announcement.weights == (1.0,)  # its examples are nobody's business
    assert (announcement.round, announcement.exchange, announcement.degree) == (4, 1, 5)
    assert (announcement.clusters, announcement.wants) == ((1,), (1,))
    assert clusters_to_fetch(row(exchange, 0), announcement) == ()
    assert clusters_to_fetch(row(exchange, 1), announcement) == (1,)
