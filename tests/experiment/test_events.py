"""Events of a run: their fields, their alarms, and the summary of them all.

Shapes: C clients, S clusters, D distributions.
"""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest

import fedspd
from fedspd.algorithms.local import Local
from fedspd.config import validate
from fedspd.experiment.events import alarms, divergence_advice, metrics_fields
from fedspd.runtime.measures import Measures

TINY = {
    "method": "fedspd",
    "clients": 4,
    "rounds": 2,
    "data": {"examples": 24},
    "topology": {"degree": 2},
    "training": {"epochs": 1, "batch": 8},
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return fedspd.run(TINY, out=tmp_path_factory.mktemp("runs") / "a")


def stored_edges(result):
    edges = json.loads((result.folder / "topology.json").read_text())["list"]
    return {(i, j) for i, j in edges}


# ---- fields


def test_events_are_one_per_round_and_one_of_the_final_phase(result):
    first, second, final = result.events()
    assert [event["event"] for event in (first, second, final)] == ["round", "round", "final"]
    assert final["traffic"] == []
    models = [len(event["traffic"][0]["models"]) for event in (first, second)]
    assert result.summary["models_sent"] == sum(models)


def test_round_event_has_the_metrics_of_every_client(result):
    for event in result.events()[:2]:
        assert len(event["accuracy"]) == len(event["loss"]) == len(event["test_loss"]) == 4
        assert np.allclose(np.array(event["mixture"]).sum(1), 1)
        assert 0.5 <= event["purity"] <= 1
        assert -0.5 <= event["adjusted_rand_index"] <= 1
        assert len(event["consensus"]) == 2
        assert all(distance >= 0 for distance in event["consensus"])
        assert np.sum(event["table"]) == 4 * 24
        assert {"train", "losses", "total"} <= set(event["seconds"])
        assert event["alarms"] == []


def test_round_event_has_the_traffic_along_the_edges(result):
    edges = stored_edges(result)
    for event in result.events()[:2]:
        (traffic,) = event["traffic"]
        for sender, receiver, cluster in traffic["models"]:
            assert (min(sender, receiver), max(sender, receiver)) in edges
            assert cluster in (0, 1)
        assert traffic["model_bytes"] == 4 * result.experiment.plan.learner.size
        models = len(traffic["models"]) * traffic["model_bytes"]
        announced = traffic["announcements"] * traffic["announcement_bytes"]
        assert event["bytes"]["point_to_point"] == models + announced


def test_round_event_has_its_edges_where_the_graph_changes():
    ring = {"kind": "ring", "remove": 0.5}
    changes = {"clients": 6, "method": "fedavg", "topology": ring, "rounds": 4}
    result = fedspd.run(TINY | changes)
    rounds = [event for event in result.events() if event["event"] == "round"]
    edges = [{(i, j) for i, j in event["edges"]} for event in rounds]
    assert edges[0] == stored_edges(result)
    assert any(later != edges[0] for later in edges)
    for event, present in zip(rounds, edges, strict=True):
        (traffic,) = event["traffic"]
        both_ways = present | {(j, i) for i, j in present}
        assert {(sender, receiver) for sender, receiver, _ in traffic["models"]} == both_ways
        assert traffic["announcements"] == len(both_ways)


def test_event_has_no_purity_for_one_distribution():
    assert fedspd.run(TINY | {"data": TINY["data"] | {"mixture": "iid"}}).summary["purity"] is None


# ---- distributions

PURE = {"examples": 24, "test_examples": 10, "shares": "pure", "populations": [3, 1]}


def test_event_adds_up_the_test_examples_of_a_distribution_over_clients():
    wrong_and_right = np.array([[[1, 2], [3, 0]], [[0, 1], [1, 1]]])
    scores = np.array([0.5, 2 / 3]), np.ones(2)
    fields = metrics_fields(Measures(*scores, None, None, None, None, tests_C2D=wrong_and_right))
    assert fields["accuracy_by_distribution"] == [4 / 5, 1 / 4]


@pytest.mark.parametrize("workers", [1, 2])
def test_accuracy_by_distribution_of_pure_clients_is_that_of_their_population(workers):
    result = fedspd.run(TINY | {"method": "fedavg", "data": PURE}, workers=workers)
    truth = result.experiment.federation.train.truth.reshape(4, 24)
    assert (truth == truth[:, :1]).all()
    for event in result.events():
        accuracy_C = np.array(event["accuracy"])
        by_hand = [accuracy_C[truth[:, 0] == d].mean() for d in range(2)]
        assert event["accuracy_by_distribution"] == pytest.approx(by_hand)
    record = result.summary["distributions"]
    assert record["names"] == ["plain", "rotated"]
    assert record["accuracy"] == pytest.approx(by_hand)
    assert record["worst"] == min(record["accuracy"])
    assert record["smallest"] == record["accuracy"][1]  # 3 clients against 1


def test_accuracy_by_distribution_counts_every_test_example_of_mixed_clients(result):
    tested_D = np.bincount(result.experiment.federation.test.truth)
    for event in result.events():
        right = np.mean(event["accuracy"]) * tested_D.sum()  # all clients have equally many
        assert np.dot(event["accuracy_by_distribution"], tested_D) == pytest.approx(right)


def test_newcomers_have_an_accuracy_by_distribution():
    config = TINY | {"method": "fedavg", "data": PURE, "holdout_clients": 2}
    scores = fedspd.run(config).summary["newcomers"]
    # Two newcomers in the proportion 3 : 1 are two of the first population.
    assert scores["accuracy_by_distribution"] == [pytest.approx(scores["accuracy"]["mean"]), None]


@pytest.mark.parametrize("mixture", ["iid", "dirichlet"])
def test_one_distribution_has_no_accuracy_by_distribution(mixture):
    result = fedspd.run(TINY | {"data": TINY["data"] | {"mixture": mixture}})
    assert not any("accuracy_by_distribution" in event for event in result.events())
    assert result.summary["distributions"] is None
    assert result.summary["adjusted_rand_index"] is None


def test_summary_does_not_count_the_shares_of_fedsoft_as_models():
    """Two clients, picked for both clusters: two votes up and two means down in each round."""
    changes = {"method": "fedsoft", "clients": 2, "fedsoft": {"select": 2}}
    result = fedspd.run(TINY | changes | {"topology": {"kind": "star"}})
    assert result.summary["models_sent"] == 2 * 2 * (2 + 2)


def test_documents_and_events_are_valid_json(result):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    documents = [*result.folder.glob("*.json"), *(result.folder / "checkpoints").rglob("*.json")]
    assert len(documents) == 6  # two checkpoints: before and after the final phase
    lines = (result.folder / "events.jsonl").read_text().splitlines()
    for text in [*(path.read_text() for path in documents), *lines]:
        json.loads(text, parse_constant=refuse)


# ---- alarms


@pytest.mark.parametrize("method", ["fedspd", "fedavg", "local"])
def test_run_that_diverges_ends_with_an_alarm(method, tmp_path):
    options = {"fedspd": {"align_every": 1}} if method == "fedspd" else {}
    changes = {"training": {"lr": 1e6}, "rounds": 3, **options}
    result = fedspd.run(TINY | {"method": method} | changes, out=tmp_path / "a", workers=2)
    sentence = "The loss is not finite at clients 0, 1, 2, 3: try a smaller training.lr."
    assert sentence in result.summary["alarms"]
    assert "NaN" not in (tmp_path / "a" / "events.jsonl").read_text()


@dataclass(frozen=True)
class Anchored(Local):
    mu: float = field(kw_only=True)  # a rate without a default
    beta: float = 1.0


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"method": "fedavg"}, "training.lr"),
        ({"method": f"{__name__}:Anchored", "options": {"mu": 2.0, "beta": 1.0}}, "options.mu"),
        ({"method": "pfedme", "pfedme": {"personal_lr": 1e9}}, "pfedme.personal_lr"),
        ({"method": "fedsoft", "fedsoft": {"lambda": 1e9}}, "fedsoft.lambda"),
        ({"training": {"lr": 9.0, "head_rate": 1e9}}, "training.lr or training.head_rate"),
        ({"training": {"weight_decay": 1e9}}, "training.weight_decay"),
        ({"training": {"weight_decay": 0.001}}, "training.lr"),
        ({"training": {"schedule": "cosine"}}, "training.lr"),
    ],
)
def test_divergence_advice_names_the_rates_that_were_raised(changes, advice):
    assert divergence_advice(validate(changes)) == f"try a smaller {advice}."


def test_warm_up_raises_no_alarm():
    result = fedspd.run(TINY | {"fedspd": {"warmup": 1}})
    assert [event["alarms"] for event in result.events()] == [[], [], []]


def measures(table, loss=0.5, test_loss=0.5):
    table_CSD = np.array(table)
    C = len(table_CSD)
    return Measures(np.zeros(C), np.full(C, test_loss), np.full(C, loss), None, table_CSD, None)


def test_alarms_report_an_empty_cluster():
    empty = "Cluster 1 is empty at every client."
    assert alarms(measures([[[5, 5], [0, 0]], [[4, 6], [0, 0]]])) == [empty]
    assert alarms(measures([[[5, 5], [0, 0]], [[4, 5], [0, 1]]])) == []


def test_alarms_report_switched_labels():
    straight, switched = [[9, 0], [1, 10]], [[0, 10], [10, 0]]
    sentence = "Labels are switched at clients 1: they label clusters differently from the rest."
    assert alarms(measures([straight, straight, straight])) == []
    assert alarms(measures([straight, switched, straight])) == [sentence]


def test_alarms_report_a_loss_that_is_not_finite():
    table = [[[9, 0], [1, 10]]] * 10
    sentence = (
        "The loss is not finite at clients 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: "
        "try a smaller training.lr."
    )
    assert alarms(measures(table, loss=np.inf)) == [sentence]
    assert alarms(measures(table, test_loss=np.nan)) == [sentence]
    assert alarms(measures(table, loss=np.nan)) == []


def test_alarms_of_a_single_client_report_its_loss_alone():
    """A node may have all examples in one cluster, and its id in the network need not be 0."""
    sentence = "The loss is not finite: try a smaller training.lr."
    assert alarms(measures([[[5, 5], [0, 0]]])) == []
    assert alarms(measures([[[5, 5], [0, 0]]], loss=np.inf)) == [sentence]
