"""FedAvg by hand, and FedSPD and FedEM where they equal it.

That is with one cluster, and in FedSPD's warm-up.

Shapes: C clients, P parameters of a model.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspd.algorithms.fedavg import FedAvg
from fedspd.algorithms.fedem import FedEM
from fedspd.algorithms.fedspd import FedSPD
from fedspd.algorithms.local import Local
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.learner import TrainingOptions, cross_entropy
from fedspd.testing import Subject
from fedspd.testing.checks import check_engines_agree


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def path_of_three(network, algorithm, rule: str = "uniform"):
    """0 - 1 - 2 with x = 1 and y = 10, 20, 60; the second client has two examples.

    All start at w = 0; steps of 0.1 (y - w).
    """
    x, y = [column(1), column(1, 1), column(1)], [column(10), column(20, 20), column(60)]
    net = network(algorithm, x, y, Graph.from_edges(3, [(0, 1), (1, 2)], rule))
    net.state = type(net.state)(torch.zeros_like(net.state.model_CP), net.state.loss_C)
    return net


@pytest.mark.parametrize(
    ("algorithm", "rule", "models"),
    [
        (Local(), "uniform", [1, 2, 6]),
        (FedAvg(), "uniform", [1.5, 3, 4]),  # (1 + 2) / 2, (1 + 2 + 6) / 3, (2 + 6) / 2
        (
            FedAvg(),
            "examples",
            [5 / 3, 11 / 4, 10 / 3],
        ),  # (1 + 2 * 2) / 3, (1 + 2 * 2 + 6) / 4, (2 * 2 + 6) / 3
        (
            FedAvg(),
            "metropolis",
            [4 / 3, 3, 14 / 3],
        ),  # a third of each neighbour, the rest of oneself
    ],
)
def test_fedavg_round_equals_numbers_worked_by_hand(network, algorithm, rule, models):
    state = path_of_three(network, algorithm, rule).run(1).state
    assert state.model_CP.flatten().tolist() == pytest.approx(models)
    losses = [(w - y) ** 2 / 2 for w, y in zip(models, (10, 20, 60), strict=True)]
    assert state.loss_C.tolist() == pytest.approx(losses)


def test_finetuning_runs_local_epochs_at_half_the_first_rate(network):
    """Each of two more steps of 0.05 multiplies the distance to y by 0.95."""
    plain, tuned = (
        path_of_three(network, FedAvg(finetune=epochs)).run(1).finish(1).state.model_CP
        for epochs in (0, 2)
    )
    assert plain.flatten().tolist() == pytest.approx([1.5, 3, 4])
    assert tuned.flatten().tolist() == pytest.approx(
        [10 - 8.5 * 0.95**2, 20 - 17 * 0.95**2, 60 - 56 * 0.95**2]
    )


def tuned_from_zero(network, y: list[list[float]], lr: float, **options):
    """Clients at w = 0 without neighbours, after one epoch of fine-tuning; and the steps taken."""
    training = TrainingOptions(lr=lr, momentum=0, batch=1000, epochs=1, decay=1)
    targets = [column(*own) for own in y]
    x, apart = [torch.ones_like(own) for own in targets], Graph.from_edges(len(y), [])
    net = network(FedAvg(finetune=1, **options), x, targets, apart, training=training)
    net.state = type(net.state)(torch.zeros_like(net.state.model_CP), net.state.loss_C)
    report = net.simulator.finish(1)
    return net.state.model_CP.flatten().tolist(), report.steps


def test_interpolation_ends_where_cross_validation_says(network):
    """At a rate of 2, one step goes from 0 to twice the mean target: half-way is right.

    One example cannot be divided, and what half of the targets 5 and -5 learn misleads: a = 0.
    Steps: one on all examples, and one on each half that has any.
    """
    y = [[1, 1, 1, 1], [1], [5, 5, -5, -5]]
    models, steps = tuned_from_zero(network, y, lr=4, interpolate="cv")
    assert models == [1, 0, 0]
    assert steps == 3 + 2 + 3
    assert tuned_from_zero(network, y, lr=4) == ([2, 2, 0], 3)


def test_interpolation_keeps_the_tuned_model_where_it_is_best(network):
    y = [[1.0, 1.1, 0.9, 1.0], [3.0, 3.0, 3.1]]
    models, _ = tuned_from_zero(network, y, lr=0.2, interpolate="cv")
    assert models == tuned_from_zero(network, y, lr=0.2)[0]


def test_interpolation_keeps_the_shared_model_where_tuning_diverges(network):
    """One step of 5e307 times 10 is beyond float64."""
    y = [[10.0, 10.0, 10.0, 10.0], [0.0, 0.0]]
    assert tuned_from_zero(network, y, lr=1e308, interpolate="cv")[0] == [0, 0]


def test_clients_start_from_one_model_and_predict_with_their_own(network):
    net = network(FedAvg(), [column(1), column(2)], [column(1), column(1)], Graph.from_edges(2, []))
    w = net.state.model_CP
    assert torch.equal(w[0], w[1])
    outputs = net.run(3).algorithm.predict(net.learner, net.state, net.data.x)
    assert [output.item() for output in outputs] == [
        net.state.model_CP[0].item(),
        2 * net.state.model_CP[1].item(),
    ]


def test_clients_start_from_models_of_their_own_if_asked(network):
    net = network(FedAvg(init="own"), [column(1)] * 2, [column(1)] * 2, Graph.from_edges(2, []))
    first, second = net.state.model_CP
    assert not torch.equal(first, second)


class Net(nn.Sequential):
    """Everything that could differ: convolution, BatchNorm, dropout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 3, 3),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(12, 3),
        )


def images(network, algorithm, ring, training: TrainingOptions):
    generator = torch.Generator().manual_seed(0)
    counts = [12, 1, 30, 7, 12, 12]
    x = [torch.randn(n, 1, 4, 4, generator=generator) for n in counts]
    y = [torch.randint(3, (n,), generator=generator) for n in counts]
    return network(
        algorithm,
        x,
        y,
        ring,
        training=training,
        factory=Net,
        loss=cross_entropy,
        dtype=torch.float32,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"init": "same"},
        {"init": "own"},
        {"selection": "uniform", "first_round": "all", "align_every": 1},
    ],
)
def test_fedspd_with_one_cluster_equals_fedavg_to_the_bit(network, ring, options):
    own = FedAvg(init="own" if options.get("init") == "own" else "same")
    training = TrainingOptions(batch=8, epochs=1)
    averaged = images(network, own, ring, training).run(11).state
    clustered = images(network, FedSPD(clusters=1, **options), ring, training).run(11).state
    assert torch.equal(clustered.centers_CSP[:, 0], averaged.model_CP)
    torch.testing.assert_close(clustered.loss_C, averaged.loss_C)


def test_fedspd_with_one_cluster_equals_fedavg_with_finetuning_to_the_bit(network, ring):
    """The final phase and fine-tuning have one schedule, however far the rate has decayed."""
    training = TrainingOptions(batch=8, decay_every=1)
    averaged = images(network, FedAvg(finetune=7), ring, training).run(5).finish(6).state
    clustered = (
        images(network, FedSPD(clusters=1, final_epochs=7), ring, training).run(5).finish(6).state
    )
    assert torch.equal(clustered.personal_CP, averaged.model_CP)


def test_warmup_equals_fedavg_to_the_bit_and_copies_the_model_to_every_cluster(network, ring):
    averaged = images(network, FedAvg(), ring, TrainingOptions(epochs=2))
    warm = images(network, FedSPD(clusters=3, warmup=3), ring, TrainingOptions(epochs=2))
    for t in range(1, 4):
        model_CP, centers_CSP = (
            averaged.run(t, first=t).state.model_CP,
            warm.run(t, first=t).state.centers_CSP,
        )
        for s in range(3):
            assert torch.equal(centers_CSP[:, s], model_CP)
    after = warm.run(4, first=4).state.centers_CSP
    assert not torch.equal(after[:, 0], after[:, 1])


def test_fedem_with_one_cluster_equals_fedavg_to_the_bit(network, ring):
    averaged = images(network, FedAvg(), ring, TrainingOptions(batch=8)).run(4).state
    mixed = images(network, FedEM(clusters=1), ring, TrainingOptions(batch=8)).run(4).state
    assert torch.equal(mixed.centers_CSP[:, 0], averaged.model_CP)
    torch.testing.assert_close(mixed.loss_C, averaged.loss_C.double())


def test_newcomer_starts_from_its_neighbours_mean_and_finetunes(network):
    """Models 1 and 3 are received, 100 is not: 2; then one step of 0.05 towards y = 12."""
    net = path_of_three(network, FedAvg(finetune=1))
    net.state = type(net.state)(column(1, 3, 100), net.state.loss_C)
    cluster_CK, model_CKP = net.algorithm.share(net.state)
    shared = Exchange(cluster_CK, model_CKP, torch.ones(3, 1), cluster_CK)
    around = Neighbourhood.of(Graph.from_edges(4, [(3, 0), (3, 1)]), [3], shared, np.arange(3))
    newcomer = Block([3], 4, [column(1)], [column(12)], 1)
    state = net.algorithm.join(net.learner, newcomer, around, net.key.at(1))
    assert state.model_CP.item() == pytest.approx(2)
    assert net.algorithm.finish(
        net.learner, state, newcomer, net.key.at(1)
    ).model_CP.item() == pytest.approx(2.5)


def test_fedprox_stays_near_the_model_that_the_round_began_with(network):
    """Client 1 takes two steps in round 1's two epochs: w = 2, then 2 + 0.1 (18 - 5 * 2) = 2.8.

    Without the term of mu = 5 it would be 3.8; the others go to 1.4 and 8.4.
    """
    x, y = [column(1), column(1), column(1)], [column(10), column(20), column(60)]
    training = TrainingOptions(lr=0.1, momentum=0, epochs=2, first_round_factor=1)
    apart = Graph.from_edges(3, [])
    for mu, models in ((0.0, [1.9, 3.8, 11.4]), (5.0, [1.4, 2.8, 8.4])):
        net = network(FedAvg(mu=mu), x, y, apart, training=training)
        net.state = type(net.state)(torch.zeros_like(net.state.model_CP), net.state.loss_C)
        assert net.run(1).state.model_CP.flatten().tolist() == pytest.approx(models)


def test_fedprox_keeps_the_contract():
    check_engines_agree(Subject(FedAvg, 1, {"mu": 0.5}))
