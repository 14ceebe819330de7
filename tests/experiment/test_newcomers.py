"""Newcomers: clients that join after training."""

import numpy as np
import pytest

import fedspd
from fedspd.algorithms import METHODS
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.experiment.newcomers import attach_newcomers

TINY = {
    "clients": 6,
    "rounds": 3,
    "data": {"examples": 40, "test_examples": 10},
    "topology": {"degree": 3},
    "training": {"batch": 10},
}


def test_newcomer_has_as_many_neighbours_as_a_client_and_none_that_is_new():
    ring = Graph.from_edges(4, [(0, 1), (1, 2), (2, 3), (3, 0)])
    graph = attach_newcomers(ring, 2, Key(0))
    assert graph.clients == 6
    assert graph.degree[4:].tolist() == [2, 2]
    assert all((graph.neighbours(i) < 4).all() for i in (4, 5))


@pytest.mark.parametrize("method", METHODS)
def test_newcomers_are_scored_and_their_traffic_is_counted(method):
    found = fedspd.run(TINY | {"method": method, "holdout_clients": 2}).summary["newcomers"]
    assert 0 <= found["accuracy"]["mean"] <= 1
    assert len(found["test_loss"]) == 2
    senders = {(i, j) for i, j in found["edges"]}
    assert len(senders) == 6
    assert all(i < 6 <= j for i, j in senders)
    one = ("fedspd-split", "fedavg", "fedper", "fedrep", "pfedme")
    clusters = {"local": 0, **dict.fromkeys(one, 1)}.get(method, 2)
    assert found["models"] == 2 * 3 * clusters  # two newcomers, three neighbours


@pytest.mark.parametrize("method", ["fedspd-split", "fedsoft"])
def test_newcomers_score_the_same_with_any_number_of_workers(method):
    config = TINY | {"method": method, "holdout_clients": 2}
    one, two = (fedspd.run(config, workers=workers).summary for workers in (1, 2))
    for name in ("newcomers", "hash", "steps"):  # the newcomers' own steps do not count
        assert one[name] == two[name]


@pytest.mark.parametrize(("method", "clusters"), [("fedavg", 1), ("fedem", 2)])
def test_newcomer_of_a_star_receives_one_mean_per_cluster(method, clusters):
    star = TINY | {"method": method, "holdout_clients": 2, "topology": {"kind": "star"}}
    assert fedspd.run(star).summary["newcomers"]["models"] == 2 * clusters


def test_summary_without_newcomers_has_none():
    assert fedspd.run(TINY).summary["newcomers"] is None


def test_newcomer_finds_its_mixture_from_the_centers_it_receives():
    """Two regressions: y = 2x for four examples of five, and y = -2x for the fifth."""
    rng = np.random.default_rng(0)

    def part(n):
        x, truth = rng.uniform(0.5, 1.5, (n, 1)), rng.random(n) < 0.2
        return x.astype(np.float32), (np.where(truth, -2, 2) * x[:, 0]).astype(np.float32)

    config = {
        "method": "fedspd",
        "clients": 8,
        "rounds": 40,
        "holdout_clients": 3,
        "model": {"name": "linear"},
        "topology": {"kind": "complete"},
        "data": {"mixture": "iid", "examples": 40, "test_examples": 5},
        "training": {"lr": 0.2, "decay": 1.0},
        "fedspd": {"final_epochs": 0},
    }
    result = fedspd.run(config, data=(*part(500), *part(100)))
    mixture = np.array(result.summary["newcomers"]["mixture"])
    network = result.mixture
    assert mixture.shape == (3, 2)
    assert network.mean(0).max() == pytest.approx(0.8, abs=0.05)  # the clusters are the regressions
    # a random assignment would have a half in each
    assert mixture.mean(0) == pytest.approx(network.mean(0), abs=0.1)
