"""What a node hears equals what the simulator tells a client. Shapes: C clients, N heard from, K offers, M wants, P numbers."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph, LinkRule
from fedspd.node.peer.answers import Answer, announcement, matching, neighbourhood, wanted
from fedspd.node.wire.messages import Request


def whole(seed: int, n: int, K: int, S: int, P: int = 3) -> Exchange:
    """What n clients offer and want; K = 1: a cluster each, else all of them."""
    generator = torch.Generator().manual_seed(seed)
    cluster_NK = (
        torch.randint(S, (n, 1), generator=generator) if K == 1 else torch.arange(S).repeat(n, 1)
    )
    K = cluster_NK.shape[1]
    weight_NK = torch.randint(1, 9, (n, K), generator=generator).double()
    return Exchange(
        cluster_NK,
        torch.randn(n, K, P, generator=generator),
        weight_NK,
        cluster_NK,
        torch.arange(n),
    )


def row(asked: Exchange, i: int) -> Exchange:
    note = asked.note_C
    assert note is not None
    return Exchange(
        asked.cluster_CK[i : i + 1],
        asked.model_CKP[i : i + 1],
        asked.weight_CK[i : i + 1],
        asked.want_CM[i : i + 1],
        note[i : i + 1],
    )


def heard_by(i: int, graph: Graph, asked: Exchange) -> Neighbourhood:
    """As a node puts it together from announcements and fetched models."""
    mine, answers = row(asked, i), []
    for j in graph.neighbours(i).tolist():
        said = announcement((1, 0), row(asked, j), int(graph.degree[j]))
        wants = wanted(mine, said)
        offer = matching(list(said.clusters), asked.model_CKP[j], Request(1, 0, wants, 3))
        answers.append(Answer(j, said, offer))
    return neighbourhood(i, mine, answers, int(graph.degree[i]), graph.rule)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1000), n=st.integers(1, 7), K=st.sampled_from([1, 2]), S=st.integers(1, 3),
    rule=st.sampled_from(["uniform", "metropolis", "examples"]),
)  # fmt: skip
def test_what_a_node_hears_and_its_mean_are_the_simulators_to_the_bit(
    seed: int, n: int, K: int, S: int, rule: LinkRule
) -> None:
    chance = np.random.default_rng(seed)
    graph = Graph.from_edges(
        n, [(i, j) for i in range(n) for j in range(i) if chance.random() < 0.5], rule
    )
    asked = whole(seed, n, K, S)
    for i in range(n):
        want_CM = asked.want_CM[i : i + 1]
        simulated, found = Neighbourhood.of(graph, [i], asked), heard_by(i, graph, asked)
        for one, other in zip(found.mean(want_CM), simulated.mean(want_CM), strict=True):
            assert torch.equal(one, other)
        for one, other in zip(found.received(0), simulated.received(0), strict=True):
            assert one[:3] == other[:3]
            assert torch.equal(one.model_P, other.model_P)


def test_only_what_is_wanted_is_fetched() -> None:
    asked = Exchange(
        torch.tensor([[0], [1]]),
        torch.ones(2, 1, 3),
        torch.ones(2, 1),
        torch.tensor([[0], [1]]),
        torch.zeros(2),
    )
    said = announcement((4, 1), row(asked, 1), 5)
    assert (said.round, said.exchange, said.clusters, said.wants, said.degree) == (
        4,
        1,
        (1,),
        (1,),
        5,
    )
    assert wanted(row(asked, 0), said) == ()
    assert wanted(row(asked, 1), said) == (1,)
