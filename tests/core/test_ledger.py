"""Who sends which model to whom, counted by hand.

Shapes: N clients, K models offered by each, M clusters wanted by each.
"""

import numpy as np

from fedspd.core.graph import Graph
from fedspd.core.ledger import (
    CLUSTER_ID_BYTES,
    HEADER_BYTES,
    NO_CLUSTER,
    SERVER,
    Traffic,
    traffic,
)

PATH = Graph.from_edges(3, [(0, 1), (1, 2)])
STAR = Graph.from_edges(3, [(0, 1), (0, 2), (1, 2)], server=True)


def count(
    graph: Graph, offered: list[list[int]], wanted: list[list[int]], is_model: bool = True
) -> Traffic:
    return traffic(graph, np.array(offered), np.array(wanted), 1000, is_model)


def models(sent: Traffic) -> set[tuple[int, ...]]:
    assert len(sent.transfer_T3) == len({tuple(row) for row in sent.transfer_T3.tolist()})
    return {tuple(row) for row in sent.transfer_T3.tolist()}


def test_model_goes_only_to_neighbours_that_want_its_cluster():
    """0 - 1 - 2; clients 0 and 1 chose cluster 5, client 2 chose 6: two models cross one edge."""
    sent = count(PATH, [[5], [5], [6]], [[5], [5], [6]])
    assert models(sent) == {(0, 1, 5), (1, 0, 5)}
    assert sent.copies == 2
    assert (sent.announcements, sent.announcement_bytes) == (4, HEADER_BYTES + 2 * CLUSTER_ID_BYTES)
    assert sent.point_to_point_bytes == 2 * 1000 + 4 * (HEADER_BYTES + 2 * CLUSTER_ID_BYTES)


def test_multicast_counts_one_copy_for_all_neighbours():
    """All chose the same: four transfers, but each client sends its model once."""
    sent = count(PATH, [[0], [0], [0]], [[0], [0], [0]])
    assert models(sent) == {(0, 1, 0), (1, 0, 0), (1, 2, 0), (2, 1, 0)}
    assert sent.copies == 3
    assert sent.multicast_bytes == 3 * 1000 + 4 * (HEADER_BYTES + 2 * CLUSTER_ID_BYTES)


def test_model_that_no_one_wants_is_not_sent():
    sent = count(PATH, [[0], [1], [0]], [[0], [1], [0]])
    assert models(sent) == set()
    assert sent.copies == 0
    assert (
        sent.point_to_point_bytes
        == sent.multicast_bytes
        == 4 * (HEADER_BYTES + 2 * CLUSTER_ID_BYTES)
    )


def test_several_offers_go_to_those_that_want_them():
    """All want clusters 0 and 1; of the offers of client 2, clusters 0 and 7, one is wanted."""
    sent = count(PATH, [[0, 1], [1, 0], [0, 7]], [[0, 1]] * 3)
    assert models(sent) == {
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 2, 0),
        (1, 2, 1),
        (2, 1, 0),
    }
    assert sent.copies == 2 + 2 + 1
    assert sent.announcement_bytes == HEADER_BYTES + 4 * CLUSTER_ID_BYTES


def test_star_sends_models_up_and_means_down():
    """Clusters 0, 0, 1 go up; each client gets the mean of its own.

    By multicast the server sends each mean once.
    """
    sent = count(STAR, [[0], [0], [1]], [[0], [0], [1]])
    assert models(sent) == {
        (0, SERVER, 0),
        (1, SERVER, 0),
        (2, SERVER, 1),
        (SERVER, 0, 0),
        (SERVER, 1, 0),
        (SERVER, 2, 1),
    }
    assert sent.copies == 3 + 2
    assert sent.announcements == 3


def test_server_has_no_mean_of_a_cluster_that_no_one_offered():
    sent = count(STAR, [[0], [0], [0]], [[0, 1], [1, 0], [1, 1]])
    assert {row for row in models(sent) if row[0] == SERVER} == {(SERVER, 0, 0), (SERVER, 1, 0)}
    assert sent.copies == 3 + 1


def test_traffic_of_few_numbers_lists_no_transfers():
    numbers = count(PATH, [[5], [5], [6]], [[5], [5], [6]], is_model=False).as_json()
    assert numbers["transfers"] == 2
    assert "models" not in numbers


def test_offer_of_no_cluster_goes_to_no_one():
    """A wish for no cluster is not met by an offer of none, on a path nor on a star."""
    none = [[5, NO_CLUSTER]] * 3
    assert len(count(PATH, none, none).transfer_T3) == 4
    assert len(count(STAR, none, none).transfer_T3) == 6


def test_traffic_as_json_has_every_field():
    assert count(PATH, [[5], [5], [6]], [[5], [5], [6]]).as_json() == {
        "models": [[1, 0, 5], [0, 1, 5]],
        "transfers": 2,
        "model_bytes": 1000,
        "announcements": 4,
        "announcement_bytes": HEADER_BYTES + 2 * CLUSTER_ID_BYTES,
        "copies": 2,
        "is_model": True,
    }
