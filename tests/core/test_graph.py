"""Closed neighbourhoods, degrees and edges of graphs that fit on a napkin."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspd.core.graph import Graph


def test_path_of_three_has_the_neighbours_known_by_hand():
    graph = Graph.from_edges(3, [(0, 1), (1, 2)])
    assert graph.clients == 3
    assert [graph.closed(i).tolist() for i in range(3)] == [[0, 1], [0, 1, 2], [1, 2]]
    assert [graph.neighbours(i).tolist() for i in range(3)] == [[1], [0, 2], [1]]
    assert graph.degree.tolist() == [1, 2, 1]
    assert graph.edges().tolist() == [[0, 1], [1, 2]]
    assert (graph.rule, graph.server) == ("uniform", False)


def test_from_edges_ignores_direction_order_repeats_and_loops():
    graph = Graph.from_edges(4, [(3, 0), (0, 3), (2, 2), (1, 0), (0, 3)])
    assert graph.edges().tolist() == [[0, 1], [0, 3]]
    assert graph.closed(0).tolist() == [0, 1, 3]
    assert graph.closed(2).tolist() == [2]


@given(st.integers(1, 12), st.sampled_from(["uniform", "metropolis"]))
def test_complete_graph_equals_the_one_with_all_edges(n, rule):
    """Though it holds no list of them."""
    complete = Graph.complete(n, rule)
    listed = Graph.from_edges(n, [(i, j) for i in range(n) for j in range(i)], rule)
    assert (complete.lists, complete.is_complete, listed.is_complete) == (None, True, False)
    for name in ("clients", "rule", "server"):
        assert getattr(complete, name) == getattr(listed, name)
    for name in ("offset", "member", "degree"):
        np.testing.assert_array_equal(getattr(complete, name), getattr(listed, name))
    np.testing.assert_array_equal(complete.edges(), listed.edges())
    for i in range(n):
        np.testing.assert_array_equal(complete.closed(i), listed.closed(i))
        np.testing.assert_array_equal(complete.neighbours(i), listed.neighbours(i))


@pytest.mark.parametrize("graph", [Graph.from_edges(4, [(0, 1), (1, 3)]), Graph.complete(4)])
def test_pairs_are_the_closed_neighbourhoods_of_the_given_clients(graph):
    receiver_H, sender_H = graph.pairs([3, 1])
    expected = [(0, j) for j in graph.closed(3)] + [(1, j) for j in graph.closed(1)]
    assert list(zip(receiver_H.tolist(), sender_H.tolist(), strict=True)) == expected


def test_client_without_an_edge_receives_from_itself():
    graph = Graph.from_edges(2, [])
    assert [graph.closed(i).tolist() for i in range(2)] == [[0], [1]]
    assert graph.degree.tolist() == [0, 0]
    assert graph.edges().shape == (0, 2)
    assert graph.offset.dtype == graph.member.dtype == np.int64
