"""The label-adjusted score: the loss plus the log frequency of the label in the cluster.

Shapes: C clients, S clusters, E examples, K classes.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedspd.algorithms.em import posterior
from fedspd.algorithms.fedem import FedEM, with_loss
from fedspd.algorithms.fedspd import FedSPD, cluster_examples
from fedspd.algorithms.label_score import LEAST_FREQUENCY, log_label_frequency, scored
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.engines.simulator import Simulator
from fedspd.testing import StrictEngine, Subject
from fedspd.testing.checks import check_newcomers_join
from fedspd.testing.subject import path_graph, run

METHODS = pytest.mark.parametrize("method", [FedSPD, FedEM])


class Table(nn.Module):
    """Logits of two classes for each value of x, which is 0 or 1: row x of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[x[:, 0].long()]


def skewed() -> tuple[Learner, Block, Tensor]:
    """One client with the examples (x, y) = (0, 0), (1, 0) and (1, 1), and two centers.

    p_0(0 | x) = 0.8 for both x: center 0 knows little but the label. p_1(0 | x) = 0.7 and 0.1.
    """
    data = Block([0], 1, [torch.tensor([[0.0], [1.0], [1.0]])], [torch.tensor([0, 0, 1])], 3)
    p_SXK = torch.tensor([[[0.8, 0.2], [0.8, 0.2]], [[0.7, 0.3], [0.1, 0.9]]], dtype=torch.double)
    return Learner(Table, dtype=torch.float64), data, p_SXK.log().view(1, 2, 4)


def test_frequency_of_a_label_is_its_mean_probability():
    p_EK = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.7, 0.3]], dtype=torch.double)
    found_K = log_label_frequency(p_EK.log()).exp()
    assert found_K.tolist() == pytest.approx([0.7 + LEAST_FREQUENCY, 0.3 + LEAST_FREQUENCY])


def test_label_that_is_never_predicted_has_the_least_frequency():
    """Else an infinite loss and a frequency of 0 would cancel."""
    found_K = log_label_frequency(torch.tensor([[0.0, -1e6]]))
    assert found_K[1].item() == pytest.approx(math.log(LEAST_FREQUENCY))


def test_score_divides_the_likelihood_by_the_frequency():
    """q_0 = 0.8 and 0.2, so p / q is 1; q_1 = (0.7 + 0.1 + 0.1) / 3 = 0.3 and 0.7."""
    learner, data, centers_CSP = skewed()
    losses_CSE = learner.losses(centers_CSP, data)
    ratio_SE = (-scored("label-adjusted", losses_CSE, learner, centers_CSP, data)[0]).exp()
    assert ratio_SE[0].tolist() == pytest.approx([1, 1, 1], rel=0.01)
    assert ratio_SE[1].tolist() == pytest.approx([0.7 / 0.3, 0.1 / 0.3, 0.9 / 0.7], rel=0.01)
    assert scored("loss", losses_CSE, learner, centers_CSP, data) is losses_CSE


@pytest.mark.parametrize(
    ("score", "clusters"), [("loss", [0, 0, 1]), ("label-adjusted", [1, 0, 1])]
)
def test_fedspd_assigns_by_the_score_and_records_the_loss(score, clusters):
    """Example 0 has 0.8 under center 0 and 0.7 under center 1; adjusted, 1 and 7 / 3."""
    learner, data, centers_CSP = skewed()
    state = replace(
        FedSPD().begin(learner, data, Key(0)),
        centers_CSP=centers_CSP,
        trained_CS=torch.ones(1, 2, dtype=torch.bool),
    )
    found = cluster_examples(learner, state, data, score)
    assert found.assignment_CE[0].tolist() == clusters
    first = 0.7 if clusters[0] else 0.8
    assert found.loss_C.item() == pytest.approx(-math.log(first * 0.8 * 0.9) / 3)


def test_fedem_weighs_by_the_score_and_records_the_likelihood():
    learner, data, centers_CSP = skewed()
    even_CS = torch.full((1, 2), 0.5, dtype=torch.double)
    plain, adjusted = (
        with_loss(learner, centers_CSP, even_CS, data, score)
        for score in ("loss", "label-adjusted")
    )
    assert adjusted.loss_C.equal(plain.loss_C)
    q_E = posterior(even_CS, plain.losses_CSE, data)[0, 1]
    assert q_E.tolist() == pytest.approx([0.7 / 1.5, 0.1 / 0.9, 0.9 / 1.1])
    q_E = posterior(even_CS, adjusted.losses_CSE, data)[0, 1]
    assert q_E.tolist() == pytest.approx([0.7, 0.25, 0.9 / 1.6], rel=0.01)
    assert adjusted.assignment_CE.tolist() == [[1, 0, 1]]


def test_center_that_is_not_a_number_is_never_the_best():
    learner, data, centers_CSP = skewed()
    centers_CSP[0, 0] = torch.nan
    state = replace(
        FedSPD().begin(learner, data, Key(0)),
        centers_CSP=centers_CSP,
        trained_CS=torch.ones(1, 2, dtype=torch.bool),
    )
    found = cluster_examples(learner, state, data, "label-adjusted")
    assert found.assignment_CE.tolist() == [[1, 1, 1]]


@METHODS
def test_label_adjusted_runs_end_in_the_same_bits_however_clients_are_divided(method):
    subject = Subject(method, 2, {"score": "label-adjusted"})
    expected = run(Simulator(subject.plan()), path_graph())
    assert run(StrictEngine(subject.plan()), path_graph()) == expected
    assert Subject(method, 2).reference() != expected


@METHODS
def test_label_adjusted_newcomers_join(method, monkeypatch):
    monkeypatch.setattr("fedspd.testing.checks.TASKS", ("classes",))  # a regression is refused
    check_newcomers_join(Subject(method, 2, {"score": "label-adjusted"}))


@METHODS
def test_regression_has_no_labels_to_adjust_for(network, method):
    x = [torch.ones(2, 1, dtype=torch.float64)]
    with pytest.raises(ConfigError) as caught:
        network(method(score="label-adjusted"), x, x, Graph.from_edges(1, []))
    sentence = "score = 'label-adjusted': a regression has no labels; expected 'loss'."
    assert str(caught.value) == f"{method.__name__.lower()}.{sentence}"
