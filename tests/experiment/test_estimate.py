"""The estimate before a run, compared with the run."""

import pytest

import fedspd
from fedspd.config import load
from fedspd.core.learner import Learner
from fedspd.experiment.build import build_experiment
from fedspd.experiment.estimate import IdleLearner, estimate
from fedspd.runtime.processes import MOST_KEPT_BYTES

SMALL = [
    "clients=8",
    "rounds=4",
    "data.examples=30",
    "training.batch=10",
    "training.epochs=1",
]


def compare(*settings):
    """Return the estimate of a run, and the run's summary."""
    config = load(None, settings)
    return estimate(build_experiment(config)), fedspd.run(config).summary


@pytest.mark.parametrize("method", ["fedavg", "fedem", "ifca", "fedsoft", "pfedme", "local"])
@pytest.mark.parametrize("kind", ["er", "star"])
def test_estimate_is_exact_where_chance_has_no_part(method, kind):
    graph = ["topology.degree=4"] if kind == "er" else []
    graph += ["fedsoft.select=8"] if (method, kind) == ("fedsoft", "star") else []
    found, run = compare(*SMALL, f"topology.kind={kind}", *graph, f"method={method}")
    assert found["steps"] == run["steps"]
    if (method, kind) != ("ifca", "star"):  # a server sends only the centers that a client chose
        assert found["bytes"] == run["bytes"]


@pytest.mark.parametrize("rounds", [17, 18, 20])
def test_estimate_counts_rounds_that_send_more_as_often_as_they_come(rounds):
    """FedSPD aligns labels in every tenth round, in which all clients receive all clusters.

    The sample trains in round 18 // 2 + 1, which is such a round.
    """
    short = ["training.epochs=1", "training.batch=10", "fedspd.final_epochs=1", "method=fedspd"]
    found, run = compare("clients=12", f"rounds={rounds}", "data.examples=20", *short)
    sent = run["bytes"]["point_to_point"]
    assert found["bytes"]["point_to_point"] == pytest.approx(sent, rel=0.25)


@pytest.mark.parametrize("rounds", [1, 30, 60])
def test_estimate_counts_a_warm_up_for_as_long_as_it_lasts(rounds):
    """In ten rounds, all clients send to all neighbours and train on all examples; then a part."""
    network = ["clients=10", "topology.kind=ring", "data.examples=20", f"rounds={rounds}"]
    network.append("method=fedspd")
    short = ["training.epochs=1", "training.batch=10", "fedspd.final_epochs=1"]
    found, run = compare(*network, *short, "fedspd.warmup=10", "evaluate_every=100")
    sent = run["bytes"]["point_to_point"]
    assert found["bytes"]["point_to_point"] == pytest.approx(sent, rel=0.1)
    assert found["steps"] == pytest.approx(run["steps"], rel=0.1)


@pytest.mark.parametrize("clusters", [[], ["clusters=2"]])
def test_estimate_counts_all_directions_of_a_search_for_the_clusters(clusters):
    """With two labellings it finds two clusters, as many as it looks for."""
    world = ["data.mixture=permutation", "data.shares=pure", "fedspd-split.max_clusters=2"]
    network = ["clients=8", "rounds=6", "data.examples=60", "topology.kind=ring"]
    found, run = compare(*world, *network, *clusters, "fedspd-split.final_epochs=0")
    assert run["clusters"] == 2
    assert found["bytes"]["multicast"] == pytest.approx(run["bytes"]["multicast"], rel=0.005)


def test_estimate_of_fedspd_is_within_a_factor_of_two():
    found, run = compare("method=fedspd", "rounds=20", "training.batch=10", "fedspd.align_every=0")
    assert found["bytes"]["multicast"] == pytest.approx(run["bytes"]["multicast"], rel=0.1)
    assert 0.5 < found["bytes"]["point_to_point"] / run["bytes"]["point_to_point"] < 2
    assert 0.5 < found["steps"] / run["steps"] < 2
    assert found["seconds"] > 0
    memory = found["memory"]
    assert memory["total"] == memory["program"] + memory["state"] + memory["rounds"]


def test_estimate_counts_what_a_second_worker_holds():
    """Each copies pages of the program, and the first process writes events meanwhile."""
    settings = ["clients=300", "rounds=2", "data.examples=4", "method=fedspd", "model.hidden=4"]
    experiment = build_experiment(load(None, [*settings, "topology.degree=20"]))
    one, two = (estimate(experiment, workers)["memory"]["rounds"] for workers in (1, 2))
    transfers = 300 * 20 / 2  # at least: half of the neighbours train the same cluster
    assert two - one > MOST_KEPT_BYTES + 100 * transfers


def test_idle_learner_is_on_the_cpu_wherever_the_run_is():
    """A fork measures memory and cannot use a GPU; `meta` stands in for one here."""
    plan = build_experiment(load(None, SMALL)).plan
    there = Learner(plan.learner.factory, plan.learner.training, plan.learner.loss, "meta")
    idle = IdleLearner(there)
    assert (idle.device.type, idle.flat.device.type, idle.size) == ("cpu", "cpu", plan.learner.size)
    assert (
        IdleLearner(plan.learner).flat is plan.learner.flat
    )  # no second model where it is not needed
