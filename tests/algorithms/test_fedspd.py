"""FedSPD step by step, with numbers to check by hand.

Shapes: C clients, S clusters, P parameters of a model, E examples.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspd.algorithms.fedspd import FedSPD, State, blend, cluster_examples, shares
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.keys import Key

ALONE = Graph.from_edges(1, [])


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def random_examples(counts: list[int], seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in counts]
    return x, [own.sum(1, keepdim=True) for own in x]


def with_mixture(net, *rows: list[float]) -> None:
    net.state = replace(net.state, mixture_CS=torch.tensor(rows, dtype=torch.float64))


# ---- the beginning


def test_first_assignment_does_not_depend_on_the_data(network, ring):
    """Same counts, other examples in another order: the same assignment.

    It can carry nothing about the truth.
    """
    x, y = random_examples([30] * 6)
    shuffled = [own.flip(0) + 1 for own in x], [own.flip(0) - 1 for own in y]
    one, other = (
        network(FedSPD(clusters=3), x, y, ring),
        network(FedSPD(clusters=3), *shuffled, ring),
    )
    assert torch.equal(one.state.assignment_CE, other.state.assignment_CE)


def test_first_assignment_is_uniform_and_the_mixture_counts_it(network):
    net = network(FedSPD(clusters=3), *random_examples([9000, 4]), Graph.from_edges(2, []))
    share_S = np.bincount(net.state.assignment_CE[0], minlength=3) / 9000
    np.testing.assert_allclose(share_S, 1 / 3, atol=5 * np.sqrt(2 / 9 / 9000))
    np.testing.assert_array_equal(net.state.mixture_CS[0], share_S)
    assert (net.state.assignment_CE[1, 4:] == -1).all()


def test_init_decides_which_clients_share_first_models(network, ring):
    x, y = random_examples([5] * 6)
    first = {
        init: network(FedSPD(clusters=2, init=init), x, y, ring).state.centers_CSP
        for init in ("cluster", "same", "own")
    }
    assert first["cluster"].unique(dim=0).shape[0] == 1  # every client has the same S draws
    assert not torch.equal(first["cluster"][0, 0], first["cluster"][0, 1])
    assert first["same"].flatten(0, 1).unique(dim=0).shape[0] == 1  # one draw
    assert (
        first["own"].flatten(0, 1).unique(dim=0).shape[0] == 12
    )  # as many as clients and clusters


@pytest.mark.parametrize("init", ["cluster", "same", "own"])
def test_begin_does_not_depend_on_the_block(network, ring, init):
    net = network(FedSPD(clusters=2, init=init), *random_examples([5, 6, 7, 8, 9, 10]), ring)
    part = Block([3, 4], 6, net.data.x[3:5], net.data.y[3:5], net.data.width)
    state = net.algorithm.begin(net.learner, part, net.key)
    for name in ("centers_CSP", "assignment_CE", "mixture_CS", "note_C"):
        assert torch.equal(getattr(state, name), getattr(net.state, name)[3:5])


# ---- step 1: which cluster, and what it is trained on


def test_mixture_selection_draws_with_probability_u(network):
    net = network(FedSPD(clusters=3), *random_examples([5, 5]), Graph.from_edges(2, []))
    with_mixture(net, [0.2, 0.0, 0.8], [0.5, 0.3, 0.2])
    draws, u_CS = 2000, net.state.mixture_CS.numpy()
    count_CS = sum(np.eye(3)[net.chosen(t)[:, 0].numpy()] for t in range(1, draws + 1))
    assert (np.abs(count_CS / draws - u_CS) <= 4 * np.sqrt(u_CS * (1 - u_CS) / draws)).all()


@pytest.mark.parametrize(
    ("clients", "clusters", "counts"), [(10, 3, [3, 3, 4]), (8, 2, [4, 4]), (3, 4, [0, 1, 1, 1])]
)
def test_uniform_selection_splits_the_network_evenly_in_every_round(
    network, clients, clusters, counts
):
    net = network(
        FedSPD(clusters=clusters, selection="uniform"),
        *random_examples([40] * clients),
        Graph.from_edges(clients, []),
    )
    splits = [net.chosen(t)[:, 0] for t in range(1, 30)]
    assert all(sorted(np.bincount(split, minlength=clusters)) == counts for split in splits)
    assert len(torch.stack(splits).unique(dim=0)) > 5


@pytest.mark.parametrize("selection", ["mixture", "uniform"])
def test_choice_does_not_depend_on_the_block(network, ring, selection):
    net = network(FedSPD(clusters=2, selection=selection), *random_examples([20] * 6), ring)
    for t in range(1, 10):
        for i in range(6):
            part = Block([i], 6, net.data.x[i : i + 1], net.data.y[i : i + 1], net.data.width)
            state = replace(net.state, mixture_CS=net.state.mixture_CS[i : i + 1])
            assert torch.equal(
                net.algorithm.choose(state, part, net.key.at(t))[0], net.chosen(t)[i]
            )


@pytest.mark.parametrize("selection", ["mixture", "uniform"])
def test_cluster_with_fewer_than_two_examples_is_chosen_by_a_split_alone(network, selection):
    net = network(
        FedSPD(clusters=3, selection=selection),
        *random_examples([5, 5]),
        Graph.from_edges(2, [(0, 1)]),
    )
    assignment_CE = torch.tensor([[0, 1, 1, 0, 2], [2, 2, 2, 2, 1]])
    net.state = replace(net.state, assignment_CE=assignment_CE, mixture_CS=shares(assignment_CE, 3))
    assert net.state.mixture_CS.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    chosen_TC = torch.stack([net.chosen(t)[:, 0] for t in range(1, 100)])
    by_mixture = selection == "mixture"
    assert set(chosen_TC[:, 0].tolist()) == {0, 1}
    assert set(chosen_TC[:, 1].tolist()) == ({2} if by_mixture else {0, 1})  # of two clients


def test_shares_equal_numbers_worked_by_hand():
    """Too few to train on count as none, unless no cluster has enough."""
    assignment_CE = torch.tensor(
        [[0, 0, 0, 1, 1, -1], [0, 1, -1, -1, -1, -1], [1, -1, -1, -1, -1, -1]]
    )
    torch.testing.assert_close(
        shares(assignment_CE, 2),
        torch.tensor([[0.6, 0.4], [0.5, 0.5], [0.0, 1.0]], dtype=torch.float64),
    )


def test_training_uses_the_examples_of_the_chosen_cluster_alone(network):
    """x = 1 always; y = 4 in cluster 0 and 8 in cluster 1.

    A step of 0.1 from 0 gives 0.4 or 0.8.
    """
    net = network(FedSPD(clusters=2), [column(1, 1, 1, 1)], [column(4, 4, 8, 8)], ALONE)
    assignment_CE = torch.tensor([[0, 0, 1, 1]])
    net.state = replace(
        net.state,
        centers_CSP=torch.zeros(1, 2, 1, dtype=torch.float64),
        assignment_CE=assignment_CE,
    )
    chosen = int(net.chosen(1))
    net.run(1)
    assert net.state.centers_CSP.flatten().tolist() == pytest.approx(
        [0.4, 0.0] if chosen == 0 else [0.0, 0.8]
    )


@pytest.mark.parametrize("warmup", [0, 2])
def test_first_round_all_offers_every_cluster_once_and_then_one(network, ring, warmup):
    algorithm = FedSPD(clusters=3, first_round="all", warmup=warmup)
    net = network(algorithm, *random_examples([20] * 6), ring)
    first = warmup + 1
    offered = next(algorithm.round(net.learner, net.run(warmup).state, net.data, net.key.at(first)))
    assert offered.cluster_CK.tolist() == offered.want_CM.tolist() == [[0, 1, 2]] * 6
    assert offered.weight_CK.sum(1).tolist() == [20] * 6
    before = net.state.centers_CSP
    after = net.run(first, first=first).state.centers_CSP
    assert (before != after).any(2).all()  # all clients moved all centers
    assert next(
        algorithm.round(net.learner, net.state, net.data, net.key.at(first + 1))
    ).cluster_CK.shape == (6, 1)


# ---- step 4: assignment and mixture


def ready(net) -> None:
    net.state = replace(net.state, trained_CS=torch.ones_like(net.state.trained_CS))


def test_example_goes_to_the_center_with_the_least_loss(network):
    """Centers 0 and 3 at x = 1: y = 1 is nearer to 0; y = 2 and 9 to 3.

    y = 1.5 is a tie, which the lower label gets.
    """
    net = network(
        FedSPD(clusters=2),
        [column(1, 1, 1, 1), column(1)],
        [column(1, 2, 9, 1.5), column(3)],
        Graph.from_edges(2, []),
    )
    ready(net)
    centers_CSP = torch.tensor([[[0.0], [3.0]]] * 2, dtype=torch.float64)
    state = cluster_examples(net.learner, replace(net.state, centers_CSP=centers_CSP), net.data)
    assert state.assignment_CE.tolist() == [[0, 1, 1, 0], [1, -1, -1, -1]]
    assert state.mixture_CS.tolist() == [[0.5, 0.5], [0.0, 1.0]]
    assert state.loss_C.tolist() == [(1 + 1 + 36 + 2.25) / 2 / 4, 0.0]


def test_examples_stay_until_every_selectable_cluster_is_trained(network):
    net = network(FedSPD(clusters=2), [column(1, 1, 1, 1)], [column(0, 3, 3, 3)], ALONE)
    centers_CSP, trained_CS = (
        torch.tensor([[[0.0], [3.0]]], dtype=torch.float64),
        torch.tensor([[True, False]]),
    )
    assignment_CE = torch.tensor([[0, 0, 1, 1]])
    state = replace(
        net.state, centers_CSP=centers_CSP, assignment_CE=assignment_CE, trained_CS=trained_CS
    )
    state = replace(state, mixture_CS=shares(assignment_CE, 2))
    assert torch.equal(cluster_examples(net.learner, state, net.data).assignment_CE, assignment_CE)
    trained = replace(state, trained_CS=torch.tensor([[True, True]]))
    assert cluster_examples(net.learner, trained, net.data).assignment_CE.tolist() == [[0, 1, 1, 1]]


def test_cluster_without_a_share_does_not_delay_the_assignment(network):
    """Three examples cannot give two to each of three clusters, so one may stay untrained."""
    net = network(FedSPD(clusters=3), [column(1, 1, 1)], [column(0, 3, 3)], ALONE)
    centers_CSP = torch.tensor([[[0.0], [3.0], [99.0]]], dtype=torch.float64)
    assignment_CE = torch.tensor([[0, 0, 1]])
    mixture_CS = shares(assignment_CE, 3)
    state = replace(
        net.state, centers_CSP=centers_CSP, assignment_CE=assignment_CE, mixture_CS=mixture_CS
    )
    state = replace(state, trained_CS=torch.tensor([[True, False, False]]))
    assert cluster_examples(net.learner, state, net.data).assignment_CE.tolist() == [[0, 1, 1]]


def test_center_that_is_not_a_number_gets_no_example(network):
    net = network(FedSPD(clusters=2), *random_examples([20] * 2), Graph.from_edges(2, [(0, 1)]))
    net.run(6)
    ready(net)
    centers_CSP = net.state.centers_CSP.clone()
    centers_CSP[0, 0] = torch.nan
    net.state = cluster_examples(net.learner, replace(net.state, centers_CSP=centers_CSP), net.data)
    assert net.state.mixture_CS[0].tolist() == [0.0, 1.0]
    assert net.state.loss_C.isfinite().all()
    assert blend(net.state).isfinite().all()
    net.run(30, first=7).finish(30)  # past three alignments
    assert (net.state.assignment_CE[0] == 1).all()
    assert net.state.personal_CP.isfinite().all()


def test_infinite_loss_is_recorded_as_infinite(network):
    net = network(FedSPD(clusters=1), [column(1, 0)], [column(0, 0)], ALONE)
    state = replace(
        net.state, centers_CSP=torch.tensor([[[1e200]]], dtype=torch.float64)
    )  # squared: beyond float64
    assert cluster_examples(net.learner, state, net.data).loss_C.tolist() == [torch.inf]


# ---- the final phase


def finished(network, **options) -> State:
    """One client, x = 1 and y = 0, so that a step of rate r multiplies the model by 1 - r.

    Blend: 0.25 * 4 + 0.75 * 8 = 7.
    """
    net = network(FedSPD(clusters=2, **options), [column(1, 1, 1, 1)], [column(0, 0, 0, 0)], ALONE)
    with_mixture(net, [0.25, 0.75])
    net.state = replace(net.state, centers_CSP=torch.tensor([[[4.0], [8.0]]], dtype=torch.float64))
    assert torch.equal(
        net.algorithm.predict(net.learner, net.state, net.data.x)[0], column(7, 7, 7, 7)
    )
    before = net.state
    net.finish()
    assert torch.equal(net.state.centers_CSP, before.centers_CSP)
    return net.state


def test_final_phase_without_epochs_is_exactly_the_blend(network):
    assert finished(network, final_epochs=0).personal_CP.tolist() == [[7.0]]


def test_final_phase_starts_at_half_the_rate_and_decays_every_three_epochs(network):
    """lr = 0.1: rates 0.05 three times, 0.04 three times, 0.032 three times, 0.0256 once."""
    after = 7 * 0.95**3 * 0.96**3 * 0.968**3 * 0.9744
    assert finished(network).personal_CP.item() == pytest.approx(after, rel=1e-14)
    assert finished(
        network, final_epochs=4, final_rate=1.0, final_decay=0.5
    ).personal_CP.item() == pytest.approx(7 * 0.9**3 * 0.95)


def test_final_phase_trains_on_all_examples(network):
    """y = 0 in cluster 0, y = 2 in cluster 1.

    From the blend 1, the mean of all examples, nothing moves.
    """
    net = network(FedSPD(clusters=2), [column(1, 1, 1, 1)], [column(0, 0, 2, 2)], ALONE)
    assignment_CE = torch.tensor([[0, 0, 1, 1]])
    centers_CSP = torch.tensor([[[0.0], [2.0]]], dtype=torch.float64)
    net.state = replace(
        net.state,
        centers_CSP=centers_CSP,
        assignment_CE=assignment_CE,
        mixture_CS=shares(assignment_CE, 2),
    )
    assert net.finish().state.personal_CP.tolist() == [[1.0]]
    assert torch.equal(
        net.algorithm.predict(net.learner, net.state, net.data.x)[0], column(1, 1, 1, 1)
    )


# ---- a newcomer


def test_newcomer_takes_the_mean_of_the_received_centers_and_finds_its_mixture(network):
    """Centers (1, -3) and (3, -1) have the mean (2, -2).

    Three of its four examples lie on y = 2x, so x_i = 0.75 * 2 - 0.25 * 2 = 1.
    """
    net = network(
        FedSPD(clusters=2, final_epochs=0),
        [column(1, 1)] * 3,
        [column(0, 0)] * 3,
        Graph.from_edges(3, [(0, 1), (1, 2)]),
    )
    centers_CSP = torch.tensor([[1, -3], [3, -1], [50, 60]], dtype=torch.float64)[:, :, None]
    cluster_CK, model_CKP = net.algorithm.share(replace(net.state, centers_CSP=centers_CSP))
    shared = Exchange(cluster_CK, model_CKP, torch.ones(3, 2), cluster_CK)
    around = Neighbourhood.of(Graph.from_edges(4, [(3, 0), (3, 1)]), [3], shared, np.arange(3))
    newcomer = Block([3], 4, [column(1, 2, 1, -1)], [column(2, 4, -2, -2)], 4)
    state = net.algorithm.join(net.learner, newcomer, around, net.key.at(9))
    assert state.centers_CSP.flatten().tolist() == [2, -2]
    assert state.assignment_CE.tolist() == [[0, 0, 1, 0]]
    assert state.mixture_CS.tolist() == [[1, 0]]  # a cluster with one example counts as none
    newcomer = Block([3], 4, [column(*[1, 2, 1, -1] * 2)], [column(*[2, 4, -2, -2] * 2)], 8)
    state = net.algorithm.join(net.learner, newcomer, around, net.key.at(9))
    assert state.mixture_CS.tolist() == [[0.75, 0.25]]
    assert net.algorithm.finish(
        net.learner, state, newcomer, net.key.at(10)
    ).personal_CP.tolist() == [[1]]


# ---- all together


@pytest.mark.parametrize("clusters", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "selection": "uniform",
            "first_round": "all",
            "init": "own",
            "warmup": 2,
            "align_every": 1,
        },
    ],
)
def test_any_number_of_clusters_works_with_a_single_example(network, ring, clusters, options):
    net = (
        network(FedSPD(clusters=clusters, **options), *random_examples([30, 1, 2, 7, 30, 3]), ring)
        .run(12)
        .finish(12)
    )
    torch.testing.assert_close(net.state.mixture_CS.sum(1), torch.ones(6, dtype=torch.float64))
    assert net.state.personal_CP.isfinite().all()
    assert net.state.loss_C.isfinite().all()
    assert torch.equal(net.state.assignment_CE >= 0, net.data.present_CE)
    assert net.state.assignment_CE.max() < clusters


def test_blend_does_not_depend_on_the_block():
    generator = Key(1).torch()
    u_CS, c_CSP = (
        torch.rand(shape, generator=generator, dtype=torch.float64)
        for shape in ((7, 3), (7, 3, 999))
    )
    empty = torch.empty(7, 0)
    state = State(c_CSP, empty, u_CS, empty, empty, empty, empty)
    alone = [
        blend(replace(state, centers_CSP=c_CSP[i : i + 1], mixture_CS=u_CS[i : i + 1]))
        for i in range(7)
    ]
    assert torch.equal(torch.cat(alone), blend(state))
    torch.testing.assert_close(blend(state), (u_CS[:, :, None] * c_CSP).sum(1))
