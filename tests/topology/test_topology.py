"""Graphs, compared with networkx and hand counts."""

import itertools
import math
import re
import time
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspd.core.errors import TopologyError
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.topology import (
    KIND_OPTIONS,
    TopologyOptions,
    build_topology,
)
from fedspd.topology.pairs import (
    absent,
    choose_connected,
    connecting_edges,
    decode,
    encode,
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


def edge_set(graph: Graph) -> set[tuple[int, int]]:
    return {(i, j) for i, j in graph.edges().tolist()}


def as_networkx(graph: Graph) -> nx.Graph:
    drawn = nx.Graph(graph.edges().tolist())
    drawn.add_nodes_from(range(graph.clients))
    return drawn


# --- generators


@given(kind=st.sampled_from(BUILT), clients=sizes, seed=seeds)
def test_graph_is_symmetric_connected_and_reflexive(kind, clients, seed):
    graph = graph_of(kind, clients, seed)
    pairs = {(i, j) for i in range(clients) for j in graph.closed(i).tolist()}
    assert graph.clients == clients
    assert pairs == {(j, i) for i, j in pairs}
    assert all((i, i) in pairs and i not in graph.neighbours(i) for i in range(clients))
    assert nx.is_connected(as_networkx(graph))


@given(
    kind=st.sampled_from(["er", "rgg"]),
    clients=st.integers(2, 40),
    seed=seeds,
    share=st.floats(0, 1),
)
def test_degree_determines_the_number_of_edges(kind, clients, seed, share):
    smallest, largest = 2 * (clients - 1) / clients, clients - 1
    degree = smallest + share * (largest - smallest)
    graph = graph_of(kind, clients, seed, degree=degree)
    assert len(graph.edges()) == round(degree * clients / 2)
    assert nx.is_connected(as_networkx(graph))


@given(clients=st.integers(2, 40), seed=seeds, share=st.floats(0, 1))
def test_probability_gives_a_connected_graph(clients, seed, share):
    graph = graph_of("er", clients, seed, probability=2 / clients + share * (1 - 2 / clients))
    assert clients - 1 <= len(graph.edges()) <= pair_count(clients)
    assert nx.is_connected(as_networkx(graph))


def test_probability_gives_the_expected_number_of_edges():
    counts = [len(graph_of("er", 100, seed, probability=0.1).edges()) for seed in range(40)]
    assert np.mean(counts) == pytest.approx(495, abs=5 * math.sqrt(4950 * 0.1 * 0.9 / 40))
    assert len(set(counts)) > 1


@given(clients=st.integers(2, 40), seed=seeds, radius=st.floats(0.001, 2))
def test_radius_gives_a_connected_graph_or_names_the_smallest_that_does(clients, seed, radius):
    try:
        graph = graph_of("rgg", clients, seed, radius=radius)
    except TopologyError as error:
        smallest = float(re.search("expected at least ([0-9.]+)[.] ", str(error))[1])
        assert smallest > radius
        graph = graph_of("rgg", clients, seed, radius=smallest)
    assert nx.is_connected(as_networkx(graph))


def test_larger_radius_keeps_links_and_adds_longer_ones():
    near, far = (edge_set(graph_of("rgg", 100, radius=radius)) for radius in (0.2, 0.3))
    assert near < far
    assert len(edge_set(graph_of("rgg", 30, radius=1.5))) == pair_count(30)


@pytest.mark.parametrize("kind", DRAWN)
def test_graph_depends_on_the_seed_alone(kind):
    assert edge_set(graph_of(kind, 30, seed=5)) == edge_set(graph_of(kind, 30, seed=5))
    assert edge_set(graph_of(kind, 30, seed=5)) != edge_set(graph_of(kind, 30, seed=6))


@pytest.mark.parametrize(
    ("kind", "clients", "degree"), [("er", 20, 6), ("rgg", 20, 6), ("ba", 200, 5.91), ("er", 4, 3)]
)
def test_degree_defaults_to_6_or_all_clients(kind, clients, degree):
    assert graph_of(kind, clients).degree.mean() == pytest.approx(degree)


def test_barabasi_albert_has_hubs():
    graph = graph_of("ba", 300, degree=4)
    assert len(graph.edges()) == 2 * (300 - 2)
    assert graph.degree.max() > 5 * graph.degree.mean()


def test_ring_grid_and_complete_graph_have_the_expected_edges():
    assert edge_set(graph_of("ring", 4)) == {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert edge_set(graph_of("grid", 6)) == {(0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5)}
    assert edge_set(graph_of("grid", 5)) == {(0, 1), (1, 2), (3, 4), (0, 3), (1, 4)}
    assert edge_set(graph_of("complete", 3)) == {(0, 1), (0, 2), (1, 2)}


def test_star_is_a_complete_graph_with_a_server_and_example_weights():
    star, complete = graph_of("star", 5), graph_of("complete", 5)
    assert (star.server, star.rule) == (True, "examples")
    assert (complete.server, complete.rule) == (False, "uniform")
    assert edge_set(star) == edge_set(complete)
    assert graph_of("star", 5, weights="uniform").rule == "uniform"


@pytest.mark.parametrize("kind", BUILT)
def test_one_client_has_no_neighbour_and_two_are_neighbours(kind):
    assert graph_of(kind, 1).closed(0).tolist() == [0]
    assert edge_set(graph_of(kind, 2)) == {(0, 1)}


def test_degree_does_not_matter_for_one_client():
    assert graph_of("er", 1, degree=6).closed(0).tolist() == [0]


@pytest.mark.parametrize("kind", DRAWN)
def test_graph_of_ten_thousand_clients_takes_seconds(kind):
    start = time.process_time()
    graph = graph_of(kind, 10_000)
    assert time.process_time() - start < 5
    assert graph.degree.mean() == pytest.approx(6, abs=0.01)


# --- edges as numbers


def as_pairs(clients: int, numbers: np.ndarray) -> list[tuple[int, int]]:
    i, j = decode(clients, numbers)
    return [*zip(i.tolist(), j.tolist(), strict=True)]


def draw_edges(data: st.DataObject, clients: int, max_size: int | None = None) -> np.ndarray:
    numbers = data.draw(st.sets(st.integers(0, pair_count(clients) - 1), max_size=max_size))
    return np.array(sorted(numbers), dtype=np.int64)


@given(clients=st.integers(2, 60), data=st.data())
def test_encode_and_decode_are_inverse(clients, data):
    everything = np.arange(pair_count(clients))
    assert as_pairs(clients, everything) == [*itertools.combinations(range(clients), 2)]
    present = draw_edges(data, clients)
    i, j = decode(clients, present)
    assert encode(clients, j, i).tolist() == present.tolist()
    others = np.setdiff1d(everything, present)
    assert absent(present, np.arange(len(others))).tolist() == others.tolist()


def test_choose_connected_replaces_the_worst_edge_that_is_not_a_bridge():
    best_first = [(0, 1), (0, 2), (1, 2), (2, 3)]
    numbers = [encode(4, np.array([i]), np.array([j])) for i, j in best_first]
    chosen = choose_connected(4, np.concatenate(numbers), 3)
    assert as_pairs(4, chosen) == [(0, 1), (0, 2), (2, 3)]


def test_connecting_edges_may_be_any_tree():
    """Of three clients, the first two are not joined first."""
    none = np.empty(0, dtype=np.int64)
    found = {tuple(connecting_edges(3, none, Key(seed).numpy()).tolist()) for seed in range(40)}
    assert found == {(0, 1), (0, 2), (1, 2)}


@given(clients=st.integers(2, 30), seed=seeds, data=st.data())
def test_connecting_edges_are_as_few_as_possible(clients, seed, data):
    some = draw_edges(data, clients, max_size=clients)
    added = connecting_edges(clients, some, np.random.default_rng(seed))
    before = nx.Graph(as_pairs(clients, some))
    after = nx.Graph(as_pairs(clients, np.concatenate([some, added])))
    before.add_nodes_from(range(clients))
    assert nx.number_connected_components(before) == len(added) + 1
    assert nx.is_connected(after)


# --- from a file


def edge_file(folder: Path, text: str) -> str:
    path = folder / "edges.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_file_may_have_comments_and_repeated_edges(tmp_path):
    file = edge_file(tmp_path, "# a path\n0 1\n\n1 0  # again\n  2\t1\n")
    assert edge_set(graph_of("file", 3, file=file)) == {(0, 1), (1, 2)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n1 x\n", ":2: '1 x' is not an edge; expected two client ids"),
        ("0 1 2\n", ":1: '0 1 2' is not an edge"),
        ("0 -1\n", ":1: '0 -1' is not an edge"),
        (
            "0 1\n# three\n1 3\n",
            ":3: client 3 does not exist with clients = 3; expected ids from 0 to 2.",
        ),
        ("1 1\n", ":1: '1 1' joins client 1 to itself"),
        ("0 1\n", "2 components (clients 0, 1; client 2); expected a connected graph."),
    ],
)
def test_file_with_an_error_is_rejected_with_its_line(tmp_path, text, message):
    file = edge_file(tmp_path, text)
    with pytest.raises(TopologyError) as caught:
        graph_of("file", 3, file=file)
    assert message in str(caught.value)
    assert file in str(caught.value)


def test_missing_file_is_rejected(tmp_path):
    with pytest.raises(TopologyError, match=r"topology\.file = '.*none': cannot be read"):
        graph_of("file", 3, file=str(tmp_path / "none"))


# --- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"degree": 25},
            "topology.degree = 25: too large for clients = 20; expected at most 19.",
        ),
        (
            {"degree": 1.5},
            "topology.degree = 1.5: fewer than the 19 edges that connect 20 clients; "
            "expected at least 1.9.",
        ),
        (
            {"kind": "rgg", "degree": 1},
            "topology.degree = 1: fewer than the 19 edges that connect 20 clients",
        ),
        (
            {"probability": 0.0},
            "topology.probability = 0: fewer than the 19 edges that connect 20 clients; "
            "expected at least 0.1.",
        ),
        (
            {"degree": 4, "probability": 0.2},
            "topology.degree = 4 and topology.probability = 0.2: both set the number of edges; "
            "expected one of them.",
        ),
        (
            {"kind": "ring", "degree": 4},
            "topology.degree = 4: not an option of topology.kind = 'ring'. Leave it out.",
        ),
        (
            {"file": "edges.txt"},
            "topology.file = 'edges.txt': not an option of topology.kind = 'er'. Leave it out.",
        ),
        (
            {"kind": "file"},
            "topology.kind = 'file': topology.file is missing; expected the path of an edge list.",
        ),
        (
            {"kind": "star", "remove": 0.1},
            "topology.remove = 0.1: not an option of topology.kind = 'star'. Leave it out.",
        ),
        (
            {"kind": "star", "weights": "clipped"},
            "topology.weights = 'clipped': a server has no model of its own to clip around",
        ),
    ],
)
def test_build_topology_rejects_impossible_options(options, message):
    with pytest.raises(TopologyError) as caught:
        build_topology(TopologyOptions(**options), 20, KEY)
    assert str(caught.value).startswith(message)


@given(clients=st.integers(2, 3000), name=st.sampled_from(["degree", "probability"]))
@settings(max_examples=30)
def test_smallest_value_that_an_error_names_is_accepted(clients, name):
    with pytest.raises(TopologyError) as caught:
        graph_of("er", clients, **{name: 0.0001})
    smallest = float(str(caught.value).rpartition(" ")[2].removesuffix("."))
    assert nx.is_connected(as_networkx(graph_of("er", clients, **{name: smallest})))


def test_build_topology_rejects_a_network_without_clients():
    with pytest.raises(TopologyError, match="clients = 0: too few; expected at least 1"):
        build_topology(TopologyOptions(), 0, KEY)


# --- dynamic graphs


def test_static_topology_has_one_graph():
    topology = build_topology(TopologyOptions(), 20, KEY)
    assert topology.at(1) is topology.at(17)
    assert (topology.kind, topology.clients, topology.options) == ("er", 20, TopologyOptions())


@given(
    visits=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    seed=seeds,
    kind=st.sampled_from(["er", "ring", "complete"]),
)
def test_graphs_do_not_depend_on_the_order_of_rounds(visits, seed, kind):
    options = TopologyOptions(kind=kind, remove=0.2)
    in_order, in_any_order = (build_topology(options, 15, Key(seed)) for _ in range(2))
    expected = [edge_set(in_order.at(round)) for round in range(1, 13)]
    for round in visits:
        assert edge_set(in_any_order.at(round)) == expected[round - 1]


def test_dynamic_topology_starts_with_the_static_graph():
    static = build_topology(TopologyOptions(), 20, KEY)
    dynamic = build_topology(TopologyOptions(remove=0.5), 20, KEY.at(9))
    assert edge_set(static.at(1)) == edge_set(dynamic.at(1)) != edge_set(dynamic.at(2))


@pytest.mark.parametrize("remove", [0.05, 0.5])
def test_remove_is_the_rate_of_removed_edges_and_the_average_degree_stays(remove):
    topology = build_topology(TopologyOptions(degree=6, remove=remove), 50, KEY)
    rounds = [edge_set(topology.at(round)) for round in range(1, 202)]
    removed = [len(now - after) / len(now) for now, after in itertools.pairwise(rounds)]
    assert np.mean(removed) == pytest.approx(remove, rel=0.1)
    assert np.mean([len(edges) for edges in rounds]) == pytest.approx(150, rel=0.1)


def test_remove_1_replaces_all_edges():
    topology = build_topology(TopologyOptions(degree=6, remove=1.0), 50, KEY)
    assert edge_set(topology.at(1)).isdisjoint(edge_set(topology.at(2)))


def test_dynamic_graph_of_ten_thousand_clients_takes_seconds():
    topology = build_topology(TopologyOptions(degree=6, remove=0.1), 10_000, KEY)
    start = time.process_time()
    assert len(topology.at(11).edges()) == pytest.approx(30_000, rel=0.05)
    assert time.process_time() - start < 5
