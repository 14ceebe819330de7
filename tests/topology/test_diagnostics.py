"""Mixing matrices and diagnostics of graphs, compared with enumeration and hand counts."""

import itertools
import math
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.topology import (
    KIND_OPTIONS,
    TopologyOptions,
    build_topology,
    consensus_rate,
    describe,
    diameter,
    diameter_bound,
    graph_mixing_matrix,
    spectral_gap,
)
from fedspd.topology.pairs import (
    pair_count,
)

DRAWN = ["er", "ba", "rgg"]
BUILT = [kind for kind in KIND_OPTIONS if kind != "file"]
KEY = Key(1)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32)
rules = st.sampled_from(["uniform", "metropolis", "examples"])


def graph_of(kind: str, clients: int, seed: int = 1, **options) -> Graph:
    return build_topology(TopologyOptions(kind=kind, **options), clients, Key(seed)).at(1)


def as_networkx(graph: Graph) -> nx.Graph:
    drawn = nx.Graph(graph.edges().tolist())
    drawn.add_nodes_from(range(graph.clients))
    return drawn


def edge_file(folder: Path, text: str) -> str:
    path = folder / "edges.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- mixing matrix


@given(
    kind=st.sampled_from(BUILT), clients=st.integers(1, 20), seed=seeds, rule=rules, data=st.data()
)
def test_mixing_matrix_rows_sum_to_one_and_inactive_clients_keep_their_models(
    kind, clients, seed, rule, data
):
    active = np.array(data.draw(st.lists(st.booleans(), min_size=clients, max_size=clients)))
    counts = np.array(data.draw(st.lists(st.integers(1, 9), min_size=clients, max_size=clients)))
    matrix = graph_mixing_matrix(
        graph_of(kind, clients, seed, weights=rule), active, counts
    ).toarray()
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-14)
    np.testing.assert_array_equal(matrix[~active], np.eye(clients)[~active])
    np.testing.assert_array_equal(matrix[:, ~active], np.eye(clients)[:, ~active])


@given(kind=st.sampled_from(BUILT), clients=st.integers(1, 20), seed=seeds, data=st.data())
def test_metropolis_matrix_is_symmetric_and_keeps_the_mean(kind, clients, seed, data):
    active = np.array(data.draw(st.lists(st.booleans(), min_size=clients, max_size=clients)))
    matrix = graph_mixing_matrix(
        graph_of(kind, clients, seed, weights="metropolis"), active
    ).toarray()
    model_N = Key(seed).numpy().standard_normal(clients)
    np.testing.assert_allclose(matrix, matrix.T, rtol=0, atol=1e-15)
    np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-14)
    assert (matrix @ model_N).mean() == pytest.approx(model_N.mean(), abs=1e-14)


@given(clients=st.integers(1, 12), seed=seeds, rule=rules, data=st.data())
def test_exchange_applies_the_mixing_matrix(clients, seed, rule, data):
    active = np.array(data.draw(st.lists(st.booleans(), min_size=clients, max_size=clients)))
    counts = np.array(data.draw(st.lists(st.integers(1, 9), min_size=clients, max_size=clients)))
    graph = graph_of("er", clients, seed, weights=rule)
    chosen_CK = torch.from_numpy(~active).long()[:, None]
    unit_N1N = torch.eye(clients, dtype=torch.float64)[:, None]
    offers = Exchange(chosen_CK, unit_N1N, torch.from_numpy(counts)[:, None], chosen_CK)
    neighbourhood = Neighbourhood.of(graph, range(clients), offers)
    applied_NN = neighbourhood.mean(torch.zeros_like(chosen_CK)).model_CMP[:, 0].numpy()
    np.testing.assert_allclose(
        graph_mixing_matrix(graph, active, counts).toarray()[active], applied_NN[active], atol=1e-15
    )


def test_mixing_matrix_of_a_path_has_the_expected_weights():
    def matrix(rule, **arguments):
        graph = Graph.from_edges(3, [(0, 1), (1, 2)], rule)
        return graph_mixing_matrix(graph, **arguments).toarray()

    third, half = 1 / 3, 1 / 2
    uniform = [[half, half, 0], [third, third, third], [0, half, half]]
    metropolis = [[2 / 3, third, 0], [third, third, third], [0, third, 2 / 3]]
    examples = [[1 / 4, 3 / 4, 0], [1 / 8, 3 / 8, 4 / 8], [0, 3 / 7, 4 / 7]]
    np.testing.assert_allclose(matrix("uniform"), uniform)
    np.testing.assert_allclose(matrix("metropolis"), metropolis)
    np.testing.assert_allclose(matrix("examples", examples=np.array([1, 3, 4])), examples)
    last_two = np.array([False, True, True])
    uniform = [[1, 0, 0], [0, half, half], [0, half, half]]
    metropolis = [[1, 0, 0], [0, 2 / 3, third], [0, third, 2 / 3]]
    np.testing.assert_allclose(matrix("uniform", active=last_two), uniform)
    np.testing.assert_allclose(matrix("metropolis", active=last_two), metropolis)


def test_changing_a_mixing_matrix_does_not_change_the_graph():
    graph = graph_of("er", 20)
    before = graph.member.copy()
    graph_mixing_matrix(graph, np.arange(20) % 2 == 0).setdiag(0)
    np.testing.assert_array_equal(graph.member, before)


# --- diagnostics


def rate_by_enumeration(graph: Graph, clusters: int) -> float:
    """Return p from every set of active clients, weighted by its probability."""
    n, chosen = graph.clients, 1 / clusters
    expected = np.zeros((n, n))
    for active in itertools.product([False, True], repeat=n):
        matrix = graph_mixing_matrix(graph, np.array(active)).toarray() - 1 / n
        expected += chosen ** sum(active) * (1 - chosen) ** (n - sum(active)) * matrix.T @ matrix
    centred = np.eye(n) - 1 / n
    return 1 - np.linalg.eigvalsh(centred @ expected @ centred).max()


@pytest.mark.parametrize("weights", ["uniform", "metropolis"])
@pytest.mark.parametrize("clusters", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{"kind": "ba", "degree": 4}, {"kind": "er", "degree": 3}, {"kind": "ring"}]
)
def test_consensus_rate_is_the_expectation_over_all_active_sets(options, clusters, weights):
    graph = graph_of(clients=7, weights=weights, **options)
    assert consensus_rate(graph, clusters, KEY) == pytest.approx(
        rate_by_enumeration(graph, clusters), abs=1e-12
    )


@pytest.mark.parametrize("weights", ["uniform", "metropolis"])
def test_consensus_rate_has_the_expected_values(weights):
    pair, all_five, ring = (
        graph_of(kind, n, weights=weights)
        for kind, n in [("ring", 2), ("complete", 5), ("ring", 4)]
    )
    assert consensus_rate(pair, 1, KEY) == pytest.approx(1)
    # Only if both chose the cluster, with probability 1/4, they exchange models.
    assert consensus_rate(pair, 2, KEY) == pytest.approx(1 / 4)
    assert consensus_rate(all_five, 1, KEY) == pytest.approx(1)
    assert consensus_rate(ring, 1, KEY) == pytest.approx(8 / 9)  # eigenvalues 1, 1/3, 1/3, -1/3
    assert spectral_gap(ring, KEY) == pytest.approx(2 / 3)
    assert spectral_gap(all_five, KEY) == pytest.approx(1)


def test_diagnostics_of_many_clients_have_the_eigenvalues_of_a_ring():
    ring = graph_of("ring", 600, weights="metropolis")
    second = 1 - 2 / 3 * (1 - math.cos(2 * math.pi / 600))
    assert spectral_gap(ring, KEY) == pytest.approx(1 - second, rel=1e-3)
    assert consensus_rate(ring, 1, KEY) == pytest.approx(1 - second**2, rel=1e-3)


@given(kind=st.sampled_from(DRAWN), clients=st.integers(1, 30), seed=seeds)
@settings(max_examples=30)
def test_spectral_gap_is_that_of_the_matrix_and_diameter_that_of_networkx(kind, clients, seed):
    graph = graph_of(kind, clients, seed)
    moduli = np.sort(np.abs(np.linalg.eigvals(graph_mixing_matrix(graph).toarray())))
    assert spectral_gap(graph, KEY) == pytest.approx(
        1 - (moduli[-2] if clients > 1 else 0), abs=1e-9
    )
    assert diameter(graph) == (nx.diameter(as_networkx(graph)), True)


def test_diameter_has_the_expected_values():
    assert diameter(graph_of("ring", 130)) == (65, True)
    assert diameter(graph_of("grid", 9)) == (4, True)
    assert diameter(graph_of("ring", 2001)) == (1000, False)


def test_diameter_bound_holds_where_the_diameter_is_not_exact_or_the_graph_changes():
    def bound(clients, kind="ring", **options):
        return diameter_bound(build_topology(TopologyOptions(kind=kind, **options), clients, KEY))

    assert (bound(130), bound(2001), bound(130, remove=0.1)) == (65, 2000, 65)
    assert (bound(9, "complete"), bound(9, "complete", remove=0.1)) == (1, 2)
    assert (bound(1, "complete", remove=0.1), bound(2, "complete", remove=0.1)) == (0, 1)


def test_describe_notes_that_uniform_weights_around_a_hub_lead_clients_apart(tmp_path):
    file = edge_file(tmp_path, "".join(f"0 {leaf}\n" for leaf in range(1, 10)))
    uniform, metropolis = (
        describe(
            build_topology(TopologyOptions(kind="file", file=file, weights=rule), 10, KEY),
            KEY,
            clusters=1,
        )
        for rule in ("uniform", "metropolis")
    )
    assert uniform["consensus_rate"] == pytest.approx(
        1 - 144 / 90
    )  # 9 at the hub and -1 at its leaves become 0 and 4
    assert uniform["notes"][0].startswith("p <= 0")
    assert metropolis["consensus_rate"] == pytest.approx(1 - 0.9**2)
    assert metropolis["notes"] == []


def test_describe_returns_the_properties_of_a_graph():
    facts = describe(
        build_topology(TopologyOptions(kind="ring", weights="metropolis", remove=0.1), 4, KEY),
        KEY,
        clusters=1,
    )
    assert facts.pop("spectral_gap") == pytest.approx(2 / 3)
    assert facts.pop("consensus_rate") == pytest.approx(8 / 9)
    degrees = {"degree_min": 2, "degree_mean": 2.0, "degree_max": 2}
    notes = ["this is round 1; each later round removes an edge with probability 0.1"]
    assert facts == degrees | {
        "kind": "ring",
        "weights": "metropolis",
        "clients": 4,
        "edges": 4,
        "connected": True,
        "diameter": 2,
        "diameter_exact": True,
        "clusters": 1,
        "notes": notes,
    }


def test_describe_notes_another_degree_and_unknown_examples():
    assert describe(build_topology(TopologyOptions(kind="ba", degree=5), 20, KEY), KEY)[
        "notes"
    ] == ["the average degree is 3.6 instead of 5"]
    assert describe(build_topology(TopologyOptions(kind="star"), 5, KEY), KEY)["notes"] == [
        "all clients have the same weight here, since their examples are not known"
    ]


def test_describe_returns_full_consensus_for_one_client():
    facts = describe(build_topology(TopologyOptions(), 1, KEY), KEY)
    assert (facts["edges"], facts["diameter"]) == (0, 0)
    assert (facts["spectral_gap"], facts["consensus_rate"]) == (1, 1)


# --- complete graphs


@pytest.mark.parametrize("rule", ["uniform", "metropolis"])
@pytest.mark.parametrize("clients", [1, 2, 7])
def test_complete_graph_has_the_diagnostics_of_its_list_of_edges(rule, clients):
    listed = Graph.from_edges(clients, [(i, j) for i in range(clients) for j in range(i)], rule)
    complete = Graph.complete(clients, rule)
    assert diameter(complete) == diameter(listed)
    assert spectral_gap(complete, KEY) == pytest.approx(spectral_gap(listed, KEY), abs=1e-12)
    assert consensus_rate(complete, 2, KEY) == pytest.approx(
        consensus_rate(listed, 2, KEY), abs=1e-12
    )


@pytest.mark.parametrize("kind", ["star", "complete"])
def test_complete_graph_needs_no_list_of_edges(kind):
    """100,000 clients would have five billion edges."""
    topology = build_topology(TopologyOptions(kind=kind), 100_000, KEY)
    assert topology.at(1).is_complete
    assert topology.at(7) is topology.at(1)
    assert describe(topology, KEY)["edges"] == 99_999 * 50_000


def test_complete_graph_may_be_dynamic():
    topology = build_topology(TopologyOptions(kind="complete", remove=0.5), 12, KEY)
    assert topology.at(1).is_complete
    assert 0 < len(topology.at(2).edges()) < pair_count(12)


# --- robust means


@pytest.mark.parametrize("rule", ["median", "trimmed", "clipped"])
def test_describe_notes_that_robust_rules_are_treated_as_uniform(rule):
    facts, plain = (
        describe(build_topology(TopologyOptions(kind="ring", weights=w), 8, KEY), KEY)
        for w in (rule, "uniform")
    )
    assert facts["spectral_gap"] == plain["spectral_gap"]
    assert facts["notes"] == [
        f"{rule} is not linear: spectral gap and p are those of uniform weights",
        *plain["notes"],
    ]
