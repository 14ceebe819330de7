"""Closed neighbourhoods, degrees and edges of graphs that fit on a napkin."""

import numpy as np

from fedspd.core.graph import Graph


def test_a_path_of_three():
    graph = Graph.from_edges(3, [(0, 1), (1, 2)])
    assert graph.clients == 3
    assert [graph.closed(i).tolist() for i in range(3)] == [[0, 1], [0, 1, 2], [1, 2]]
    assert [graph.neighbours(i).tolist() for i in range(3)] == [[1], [0, 2], [1]]
    assert graph.degree.tolist() == [1, 2, 1]
    assert graph.edges().tolist() == [[0, 1], [1, 2]]
    assert (graph.rule, graph.server) == ("uniform", False)


def test_direction_order_repeats_and_loops_of_the_edges_do_not_matter():
    graph = Graph.from_edges(4, [(3, 0), (0, 3), (2, 2), (1, 0), (0, 3)])
    assert graph.edges().tolist() == [[0, 1], [0, 3]]
    assert graph.closed(0).tolist() == [0, 1, 3]
    assert graph.closed(2).tolist() == [2]


def test_clients_without_an_edge_hear_themselves():
    graph = Graph.from_edges(2, [])
    assert [graph.closed(i).tolist() for i in range(2)] == [[0], [1]]
    assert graph.degree.tolist() == [0, 0]
    assert graph.edges().shape == (0, 2)
    assert graph.offset.dtype == graph.member.dtype == np.int64
