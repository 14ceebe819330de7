"""The estimate before a run, against the run."""

import pytest

import fedspd
from fedspd.config import load
from fedspd.core.learner import Learner
from fedspd.experiment.build import build_experiment
from fedspd.experiment.estimate import IdleLearner, estimate

SMALL = [
    "clients=8",
    "rounds=4",
    "data.examples=30",
    "topology.degree=4",
    "training.batch=10",
    "training.epochs=1",
]


@pytest.mark.parametrize("method", ["fedavg", "fedem", "ifca", "fedsoft", "pfedme", "local"])
@pytest.mark.parametrize("kind", ["topology.kind=er", "topology.kind=star"])
def test_what_does_not_depend_on_chance_is_exact(method, kind):
    settings = (
        SMALL
        if kind.endswith("er")
        else [word for word in SMALL if not word.startswith("topology")]
    )
    config = load(None, [*settings, kind, f"method={method}", "fedsoft.select=8"])
    found, run = estimate(build_experiment(config)), fedspd.run(config).summary
    assert found["steps"] == run["steps"]
    if (method, kind) != (
        "ifca",
        "topology.kind=star",
    ):  # a server sends down only the centers that somebody chose
        assert found["bytes"] == run["bytes"]


@pytest.mark.parametrize("rounds", [17, 18, 20])
def test_rounds_that_send_more_than_others_count_as_often_as_they_come(rounds):
    """FedSPD aligns labels in every tenth round, and then everybody hears all clusters: 18 // 2 + 1 is such a round."""
    config = load(
        None,
        [
            "clients=12",
            f"rounds={rounds}",
            "data.examples=20",
            "training.epochs=1",
            "training.batch=10",
            "fedspd.final_epochs=1",
        ],
    )
    found, run = estimate(build_experiment(config)), fedspd.run(config).summary
    assert found["bytes"]["point_to_point"] == pytest.approx(
        run["bytes"]["point_to_point"], rel=0.25
    )


@pytest.mark.parametrize("rounds", [1, 30, 60])
def test_a_warm_up_counts_for_as_long_as_it_lasts(rounds):
    """Ten rounds in which everybody sends to all neighbours and trains on all examples; then only part of them does."""
    settings = [
        "clients=10",
        f"rounds={rounds}",
        "topology.kind=ring",
        "data.examples=20",
        "training.epochs=1",
        "training.batch=10",
    ]
    config = load(
        None, [*settings, "fedspd.warmup=10", "fedspd.final_epochs=1", "evaluate_every=100"]
    )
    found, run = estimate(build_experiment(config)), fedspd.run(config).summary
    assert found["bytes"]["point_to_point"] == pytest.approx(
        run["bytes"]["point_to_point"], rel=0.1
    )
    assert found["steps"] == pytest.approx(run["steps"], rel=0.1)


def test_fedspd_is_near():
    config = load(None, ["rounds=20", "training.batch=10", "fedspd.align_every=0"])
    found, run = estimate(build_experiment(config)), fedspd.run(config).summary
    assert found["bytes"]["multicast"] == pytest.approx(run["bytes"]["multicast"], rel=0.1)
    assert 0.5 < found["bytes"]["point_to_point"] / run["bytes"]["point_to_point"] < 2
    assert 0.5 < found["steps"] / run["steps"] < 2
    assert found["seconds"] > 0
    assert found["memory"]["total"] == sum(
        count for part, count in found["memory"].items() if part != "total"
    )


def test_a_rehearsal_is_on_the_cpu_wherever_the_run_is():
    """Its memory is looked at in a fork, which cannot use a GPU; `meta` stands for one here."""
    plan = build_experiment(load(None, SMALL)).plan
    there = Learner(plan.learner.factory, plan.learner.training, plan.learner.loss, "meta")
    idle = IdleLearner(there)
    assert (idle.device.type, idle.flat.device.type, idle.size) == ("cpu", "cpu", plan.learner.size)
    assert (
        IdleLearner(plan.learner).flat is plan.learner.flat
    )  # no second model where it is not needed
