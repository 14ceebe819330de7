"""Clients that split apart or missed the split end with one labelling.

Shapes: N clients, S clusters, K heads offered, Q parameters of a head.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedspd.algorithms.fedspd_split import FedSPDSplit
from fedspd.algorithms.labellings import (
    MAX_LABELLING,
    NO_LABELLING,
    best_labelling,
    exchange_heads,
    exchange_picked_body,
    has_own_bodies,
    left_alone,
    name_labelling,
    own_labelling,
    pack_labelling,
    unpack_labelling,
    with_own_bodies,
)
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.engines.simulator import Simulator
from fedspd.runtime.plan import Plan

PATH = Graph.from_edges(3, [(0, 1), (1, 2)])
ONE = [torch.zeros(1, 1)] * 3
DATA = Block(range(3), 3, ONE, ONE, 1, rounds=9, diameter=2)


def answer(generator, graph: Graph):
    """Return the result of a generator that makes one exchange."""
    asked = next(generator)
    with pytest.raises(StopIteration) as end:
        generator.send(Neighbourhood.of(graph, range(graph.clients), asked))
    return end.value.value


def test_labelling_names_the_corners_and_their_order():
    norm, clusters = torch.tensor([2.0] * 4), torch.tensor([2, 2, 2, 3])
    corner = torch.tensor([[5.0, 7, 9], [5, 7, 8], [7, 5, 9], [5, 7, 9]])
    one, other_rest, other_order, other_count = name_labelling(norm, corner, clusters).tolist()
    assert one == other_rest, "corners beyond S do not count"
    assert len({one, other_order, other_count}) == 3


def test_labelling_with_the_more_extreme_corner_is_larger_and_a_lonely_one_least():
    corner, two = torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([2, 2])
    weak, strong = name_labelling(torch.tensor([1.0, 1.001]), corner, two).tolist()
    assert NO_LABELLING < int(own_labelling([4], torch.tensor([2]))) < weak < strong


def test_labelling_says_whether_clusters_have_bodies_of_their_own():
    corner, two = torch.tensor([[0.0, 1.0]]), torch.tensor([2])
    plain = torch.cat([name_labelling(torch.tensor([1.5]), corner, two), own_labelling([4], two)])
    assert has_own_bodies(plain).tolist() == [False, False]
    own = with_own_bodies(plain, torch.tensor([True, False]))
    assert has_own_bodies(own).tolist() == [True, False]
    assert has_own_bodies(unpack_labelling(pack_labelling(own))).tolist() == [True, False]
    assert (own - plain).tolist() == [1, 0]
    nothing = torch.tensor([NO_LABELLING])
    assert with_own_bodies(nothing, torch.tensor([True])).tolist() == [NO_LABELLING]


def test_packed_labelling_is_exact_in_float32():
    found = name_labelling(
        torch.tensor([0.0, 3e-5, 812.7]), torch.zeros(3, 1), torch.ones(3).long()
    )
    found = torch.cat([found, torch.tensor([NO_LABELLING])])
    assert torch.equal(unpack_labelling(pack_labelling(found).float()), found)


def test_heads_of_two_labellings_are_never_averaged():
    heads = torch.tensor([[1.0, 10.0, -10.0], [2.0, 20.0, -20.0], [6.0, 60.0, -60.0]])[:, :, None]
    three, labelling = torch.tensor([3, 3, 3]), torch.tensor([5, 5, 9])
    found = answer(exchange_heads(heads, three, labelling, DATA), PATH)
    assert found.heads_CSQ[0, :, 0].tolist() == [1.5, 15.0, -15.0]
    assert found.heads_CSQ[1, :, 0].tolist() == [1.5, 15.0, -15.0]
    assert found.heads_CSQ[2, :, 0].tolist() == [6.0, 60.0, -60.0]
    assert found.labelling_C.tolist() == [5, NO_LABELLING, 9], "client 1 hears of a larger one"
    assert not found.has_joined_C.any()


def test_client_joins_with_the_heads_of_its_neighbours_alone():
    heads = torch.tensor([[1.0, 10.0, -10.0], [2.0, 20.0, -20.0], [6.0, 60.0, -60.0]])[:, :, None]
    clusters, labelling = torch.tensor([1, 1, 3]), torch.tensor([3, NO_LABELLING, 9])
    found = answer(exchange_heads(heads, clusters, labelling, DATA), PATH)
    assert found.heads_CSQ[1, :, 0].tolist() == [6.0, 60.0, -60.0]
    assert found.labelling_C.tolist() == [3, 9, 9]
    assert found.clusters_C.tolist() == [1, 3, 3]
    assert found.has_joined_C.tolist() == [False, True, False]
    assert found.heads_CSQ[2, 0, 0] == 6.0, "one that joins offers nothing"


def test_client_that_joins_takes_bodies_of_any_cluster():
    body, picked = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([[1], [0], [0]])
    labelling = torch.tensor([9, NO_LABELLING, 9])
    found = answer(exchange_picked_body(body, picked, labelling, 2, DATA), PATH)
    assert found[:, 0].tolist() == [1.0, 3.0, 5.0]


def test_clients_without_any_labelling_name_their_own():
    heads, none = torch.ones(3, 3, 1), torch.full((3,), NO_LABELLING)
    found = answer(exchange_heads(heads, torch.ones(3, dtype=torch.long), none, DATA), PATH)
    assert len(set(found.labelling_C.tolist())) == 3
    assert (found.labelling_C >= 0).all()
    assert torch.equal(found.heads_CSQ, heads)


@pytest.mark.parametrize(("rule", "expected"), [("uniform", 9), ("median", 5)])
def test_robust_rule_asks_for_two_witnesses_of_a_better_labelling(rule, expected):
    graph = Graph.from_edges(4, [(0, 1), (0, 2), (0, 3)], rule)
    asked = Exchange(
        torch.zeros(4, 1, dtype=torch.long),
        torch.zeros(4, 1, 1),
        torch.ones(4, 1),
        torch.zeros(4, 1, dtype=torch.long),
        torch.tensor([3, 5, 5, 9]),
    )
    assert int(best_labelling(Neighbourhood.of(graph, range(4), asked))[0]) == expected


@pytest.mark.parametrize("rule", ["uniform", "median"])
@pytest.mark.parametrize("lie", [MAX_LABELLING + 1, 0x7FC00000 << 24, 2**62, 2**63 - 1])
def test_note_that_no_split_can_have_is_no_labelling(lie, rule):
    """Its norm would not be finite: a client that took it could offer a newcomer no state."""
    graph = Graph.from_edges(4, [(0, 1), (0, 2), (0, 3)], rule)
    heads, two = torch.ones(4, 2, 1), torch.tensor([2] * 4)
    labelling = torch.tensor([5, 5, lie, lie])
    four = ONE[:1] * 4
    data = Block(range(4), 4, four, four, 1, rounds=9, diameter=2)
    found = answer(exchange_heads(heads, two, labelling, data), graph)
    assert found.labelling_C[:2].tolist() == [5, 5]
    largest = torch.tensor([MAX_LABELLING])
    assert pack_labelling(largest).isfinite().all()
    assert torch.equal(unpack_labelling(pack_labelling(largest)), largest)


def test_client_is_left_alone_only_if_neighbours_should_have_answered():
    asked = Exchange(*(torch.zeros(3, 1, dtype=torch.long) for _ in range(4)))
    graph = Graph.from_edges(3, [(0, 1)])
    assert not left_alone(Neighbourhood.of(graph, range(3), asked)).any(), "2 has no neighbour"
    silent = replace(asked, **{name: getattr(asked, name)[:1] for name in
                               ("cluster_CK", "model_CKP", "weight_CK", "want_CM")})  # fmt: skip
    assert left_alone(Neighbourhood.of(graph, [0], silent, np.array([0]))).all()


def test_client_is_left_alone_by_a_robust_rule_with_one_neighbour():
    asked = Exchange(*(torch.zeros(4, 1, dtype=torch.long) for _ in range(4)))
    for rule, alone in (("uniform", []), ("clipped", [3])):
        graph = Graph.from_edges(4, [(0, 1), (1, 2), (2, 0), (2, 3)], rule)
        found = left_alone(Neighbourhood.of(graph, range(4), asked))
        assert found.nonzero()[:, 0].tolist() == alone


# ---- complete runs


def populations(n: int, examples: int = 60):
    """Clients of two populations that label differently, by turns."""
    rng = np.random.default_rng(0)
    other, teacher = np.array([2, 3, 0, 1]), rng.normal(size=(10, 4))
    x = [torch.from_numpy(rng.normal(size=(examples, 10)).astype(np.float32)) for _ in range(n)]
    label = [(own.double().numpy() @ teacher).argmax(1) for own in x]
    y = [torch.from_numpy(other[own] if i % 2 else own) for i, own in enumerate(label)]
    return x, y


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))


def engine_of(n: int, rounds: int, diameter: int, **options) -> Simulator:
    x, y = populations(n)
    data = Block(range(n), n, x, y, 60, rounds=rounds, diameter=diameter)
    truth = [np.full(60, i % 2) for i in range(n)]
    learner = Learner(mlp, TrainingOptions(lr=0.2, batch=10, decay=1))
    engine = Simulator(Plan(FedSPDSplit(**options), learner, data, data, truth, 2, Key(0)))
    engine.begin()
    return engine


def assert_two_populations(state, clients=range(12)):
    """All have one labelling of two clusters, and each population has a cluster of its own."""
    assert len(set(state.labelling_C.tolist())) == 1
    assert state.clusters_C.tolist() == [2] * len(state.clusters_C)
    first = state.mixture_CS[0].argmax()
    for client in clients:
        assert state.mixture_CS[client, first if client % 2 == 0 else 1 - first] > 0.9


RING = [(i, (i + k) % 12) for i in range(12) for k in (1, 2)]


@pytest.mark.parametrize("clusters", [0, 2])
def test_halves_that_split_apart_end_with_one_labelling(clusters):
    halves = Graph.from_edges(12, [(i, j) for i, j in RING if (i < 6) == (j < 6)])
    engine = engine_of(12, 14, 6, clusters=clusters)
    for t in range(1, 6):
        engine.round(t, halves)
    apart = engine.block.state.labelling_C.tolist()
    assert len(set(apart)) == 2
    assert len(set(apart[:6])) == len(set(apart[6:])) == 1
    for t in range(6, 15):
        engine.round(t, Graph.from_edges(12, RING))
    assert_two_populations(engine.block.state)
    assert engine.block.state.labelling_C[0] == max(apart)
    assert engine.measure().accuracy_C.mean() > 0.85


def test_client_away_during_the_split_joins_in_its_next_round():
    engine = engine_of(12, 8, 6, clusters=2)
    for t in range(1, 5):
        engine.round(t, Graph.from_edges(12, RING))
    state, early = engine.block.state, engine_of(12, 8, 6, clusters=2).block.state
    tables = {name: getattr(state, name).clone() for name in vars(state)}
    for name, table in tables.items():
        table[3] = getattr(early, name)[3]  # as before round 1
    engine.block.state = type(state)(**tables)
    assert engine.block.state.labelling_C[3] == NO_LABELLING
    engine.round(5, Graph.from_edges(12, RING))
    assert_two_populations(engine.block.state)


def test_client_without_neighbours_never_prevails():
    engine, late = engine_of(12, 10, 6, clusters=2), Graph.from_edges(12, RING)
    lonely = Graph.from_edges(12, [(i, j) for i, j in RING if 0 not in (i, j)])
    for t in range(1, 5):
        engine.round(t, lonely)
    labelling = engine.block.state.labelling_C.tolist()
    assert labelling[0] < min(labelling[1:])
    for t in range(5, 11):
        engine.round(t, late)
    assert_two_populations(engine.block.state)
    assert engine.block.state.labelling_C[0] == labelling[1]


@pytest.mark.parametrize("rule", ["median", "trimmed", "clipped"])
def test_split_works_with_robust_rules(rule):
    engine = engine_of(12, 8, 1, clusters=2)
    for t in range(1, 9):
        engine.round(t, Graph.complete(12, rule))
    assert_two_populations(engine.block.state)


def test_client_with_one_neighbour_joins_what_the_others_found_by_a_robust_rule():
    """Alone it would find no one else; as the lowest id it would decide for all."""
    engine = engine_of(12, 8, 6)
    rest = [(i, j) for i in range(1, 12) for j in range(1, i)]
    for t in range(1, 9):
        engine.round(t, Graph.from_edges(12, [(0, 1), *rest], "median"))
    assert_two_populations(engine.block.state)


def test_newcomer_joins_the_better_of_two_labellings():
    engine = engine_of(12, 9, 6, clusters=2)
    for t in range(1, 6):
        engine.round(t, Graph.from_edges(12, RING))
    plan, state = engine.plan, engine.block.state
    weak_C = torch.where(torch.arange(12) < 2, 7, state.labelling_C)
    cluster_CK, model_CKP = plan.algorithm.share(replace(state, labelling_C=weak_C))
    offers = Exchange(cluster_CK, model_CKP, torch.ones(12, 1), cluster_CK)
    x, y = populations(12)
    data = Block([13], 14, x[1:2], y[1:2], 60, rounds=9, diameter=6)
    graph = Graph.from_edges(14, [(13, i) for i in (0, 1, 4, 7)])
    near = Neighbourhood.of(graph, [13], offers, np.arange(12))
    joined = plan.algorithm.join(plan.learner, data, near, Key(0, 5))
    assert joined.labelling_C.tolist() == [int(state.labelling_C[4])]
    mean = (state.offsets_CSQ[4] + state.offsets_CSQ[7]) / 2
    assert torch.allclose(joined.offsets_CSQ[0], mean, atol=1e-6)
    assert joined.mixture_CS[0].argmax() == state.mixture_CS[1].argmax()
    assert joined.mixture_CS.max() > 0.9
