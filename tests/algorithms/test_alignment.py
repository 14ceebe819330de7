"""Label switching: matching by cosine, notes that lead to client 0, and switched networks.

Shapes: C clients, S clusters, W weights of a model.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedspd.algorithms.alignment import first_notes, match_labels, new_labels
from fedspd.algorithms.fedspd import FedSPD, relabelled, shares
from fedspd.core.exchange import Exchange, Neighbourhood, ReceivedModel
from fedspd.core.graph import Graph

EAST, NORTH, WEST = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 0.0])


def models(**by_cluster: Tensor) -> list[ReceivedModel]:
    """s0=..., s1=...: a model of cluster 0, of cluster 1."""
    return [ReceivedModel(9, 0, int(name[1:]), model) for name, model in by_cluster.items()]


@pytest.mark.parametrize(
    ("received", "labels"),
    [
        (models(s0=EAST, s1=NORTH, s2=WEST), [0, 1, 2]),
        (models(s0=NORTH, s1=WEST, s2=EAST), [2, 0, 1]),
        # NORTH becomes 0, EAST takes the label that NORTH gave up, nothing was received of 2.
        (models(s0=NORTH), [1, 0, 2]),
        (models(s2=NORTH), [0, 2, 1]),
        (models(s1=NORTH), [0, 1, 2]),
        (models(s1=3 * WEST + NORTH, s0=2 * NORTH), [2, 0, 1]),  # length does not matter
    ],
)
def test_center_takes_the_label_of_the_model_that_it_resembles(received, labels):
    assert match_labels(torch.stack([EAST, NORTH, WEST]), received).tolist() == labels


def test_matching_is_the_best_assignment_not_the_best_pair():
    """Both received models point most to the first center (0.8 and 0.6 against 0.6 and 0).

    0.6 + 0.6 beats 0.8 + 0.
    """
    received = models(s0=torch.tensor([0.8, 0.6]), s1=torch.tensor([0.6, -0.8]))
    assert match_labels(torch.stack([EAST, NORTH]), received).tolist() == [1, 0]


def test_models_of_one_cluster_count_by_their_mean():
    received = [*models(s0=EAST), *models(s0=3 * NORTH), *models(s1=EAST)]
    assert match_labels(torch.stack([EAST, NORTH]), received).tolist() == [1, 0]


def test_center_that_is_not_a_number_gets_the_free_label():
    assert match_labels(torch.stack([EAST * torch.nan, EAST]), models(s0=EAST)).tolist() == [1, 0]


def offer(note: Tensor, cluster: list[int], models: list[Tensor]) -> Exchange:
    cluster_C1 = torch.tensor(cluster)[:, None]
    return Exchange(
        cluster_C1, torch.stack(models)[:, None], torch.ones_like(cluster_C1), cluster_C1, note
    )


def test_notes_spread_from_client_0_one_hop_at_a_time():
    """A path 0 - 1 - 2 - 3. First every client follows its lower neighbour.

    After three alignments all follow client 0.
    """
    graph, centers_CSW = (
        Graph.from_edges(4, [(0, 1), (1, 2), (2, 3)]),
        torch.stack([EAST, NORTH]).repeat(4, 1, 1),
    )
    note_C = first_notes(torch.arange(4), 4)
    seen = [note_C.tolist()]
    for _ in range(4):
        neighbourhood = Neighbourhood.of(graph, range(4), offer(note_C, [0] * 4, [EAST] * 4))
        label_CS, note_C = new_labels(centers_CSW, note_C, neighbourhood)
        assert label_CS.tolist() == [[0, 1]] * 4
        seen.append(note_C.tolist())
    assert seen == [[0, 5, 10, 15], [0, 1, 6, 11], [0, 1, 2, 7], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_client_follows_the_lowest_received_note_and_never_a_higher_one():
    graph = Graph.from_edges(3, [(0, 1), (1, 2)])
    note_C = torch.tensor([0, 4, 8])
    neighbourhood = Neighbourhood.of(graph, range(3), offer(note_C, [0, 0, 0], [NORTH, EAST, EAST]))
    label_CS, _ = new_labels(torch.stack([EAST, NORTH]).repeat(3, 1, 1), note_C, neighbourhood)
    assert label_CS.tolist() == [
        [0, 1],
        [1, 0],
        [0, 1],
    ]  # client 1 listens to 0, not to 2; client 2 to 1, as it was


def test_relabelled_moves_everything_that_has_a_label(network):
    net = network(
        FedSPD(clusters=3),
        [torch.ones(4, 1).double()],
        [torch.ones(4, 1).double()],
        Graph.from_edges(1, []),
    )
    state = replace(
        net.state,
        centers_CSP=torch.tensor([[[10.0], [11.0], [12.0]]]),
        assignment_CE=torch.tensor([[0, 1, 2, -1]]),
        mixture_CS=torch.tensor([[0.1, 0.2, 0.7]]),
        trained_CS=torch.tensor([[True, False, False]]),
    )
    new = relabelled(state, torch.tensor([[2, 0, 1]]), torch.tensor([5]))
    assert new.centers_CSP.flatten().tolist() == [11.0, 12.0, 10.0]
    assert new.assignment_CE.tolist() == [[2, 0, 1, -1]]
    assert new.mixture_CS.flatten().tolist() == pytest.approx([0.2, 0.7, 0.1])
    assert new.trained_CS.tolist() == [[False, False, True]]
    assert new.note_C.tolist() == [5]


def two_clients(network, labels: list[int], align_every: int):
    """Both have y = 10 x, where x is the first axis, and y = -10 x, where it is the second.

    Client 1's labels may differ.
    """
    x = torch.eye(2, dtype=torch.float64).repeat_interleave(5, 0)
    y = 10 * (x[:, :1] - x[:, 1:])
    net = network(
        FedSPD(clusters=2, align_every=align_every), [x, x], [y, y], Graph.from_edges(2, [(0, 1)])
    )
    assignment_CE = torch.tensor([[0] * 5 + [1] * 5] * 2)
    centers_CSP = torch.tensor([[[10.0, 0.1], [0.1, -10.0]]] * 2, dtype=torch.float64)
    state = replace(
        net.state,
        centers_CSP=centers_CSP,
        assignment_CE=assignment_CE,
        mixture_CS=shares(assignment_CE, 2),
    )
    net.state = relabelled(state, torch.tensor([[0, 1], labels]), state.note_C)
    return net


def test_switched_client_exchanges_its_labels_and_keeps_its_centers(network):
    """Its neighbours' models carry the new labels and its own the old ones.

    It must not average across them.
    """
    for seed_round in range(1, 5):  # for several choices of the two
        net = two_clients(network, [1, 0], align_every=1)
        net.run(seed_round, first=seed_round)
        torch.testing.assert_close(
            net.state.centers_CSP[1],
            torch.tensor([[10.0, 0.1], [0.1, -10.0]], dtype=torch.float64),
            rtol=0,
            atol=0.2,
        )
        assert net.state.assignment_CE[1].tolist() == [0] * 5 + [1] * 5
        assert net.state.note_C.tolist() == [0, 1]


def test_alignment_changes_nothing_where_labels_agree(network):
    one, other = (two_clients(network, [0, 1], align_every).run(4).state for align_every in (0, 1))
    assert torch.equal(one.centers_CSP, other.centers_CSP)
    assert torch.equal(one.assignment_CE, other.assignment_CE)
