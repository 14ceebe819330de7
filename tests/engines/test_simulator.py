"""The result does not depend on the number of workers."""

from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedspd
from fedspd.algorithms import METHODS
from fedspd.algorithms.local import Local
from fedspd.config import validate, without_other_methods
from fedspd.core.errors import MethodError
from fedspd.core.exchange import Exchange
from fedspd.core.graph import Graph
from fedspd.engines.engine import split_clients
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import build_experiment

TINY = {
    "clients": 5,
    "rounds": 3,
    "data": {"examples": 24, "imbalance": 2.0},
    "topology": {"degree": 2},
    "training": {"epochs": 1, "batch": 8},
    "method": "fedspd",
    "fedspd": {"final_epochs": 1, "align_every": 2},
}

MEASURED = ("fedspd-split", "fedspd", "fedsoft", "local")  # all kinds of measures and traffic


def outcome(config, workers, model=None):
    """Return the hash of the final state, and all events without their times."""
    result = fedspd.run(config, workers=workers, model=model)
    events = [
        {key: value for key, value in event.items() if key != "seconds"}
        for event in result.events()
    ]
    return result.summary["hash"], events


@pytest.mark.parametrize(
    "method",
    [m if m in MEASURED else pytest.param(m, marks=pytest.mark.long) for m in METHODS],
)
def test_simulator_records_the_same_with_one_and_three_workers(method):
    """The states of all methods are compared by the contract's checks."""
    config = without_other_methods(TINY | {"method": method}, method)
    assert outcome(config, 3) == outcome(config, 1)


def test_simulator_takes_more_workers_than_clients():
    config = TINY | {"clients": 3, "rounds": 2}
    assert outcome(config, 5) == outcome(config, 1)


def test_simulator_gives_another_result_for_another_seed():
    config = TINY | {"rounds": 1}
    assert outcome(config | {"seed": 1}, 1)[0] != outcome(config, 1)[0]


@pytest.mark.parametrize(
    "topology",
    [{"degree": 2, "remove": 0.5}, {"kind": "star"}, {"kind": "complete", "weights": "metropolis"}],
)
def test_simulator_gives_the_same_result_on_other_topologies(topology):
    config = TINY | {"topology": topology}
    assert outcome(config, 2) == outcome(config, 1)


def conv_net(shape, classes):
    """Convolution, BatchNorm and dropout: statistics that travel, and draws inside the model."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, classes),
    )


def test_simulator_repeats_batchnorm_and_dropout_with_any_number_of_workers():
    config = TINY | {"rounds": 2}
    one = outcome(config, 1, conv_net)
    assert outcome(config, 2, conv_net) == one
    assert outcome(config, 3, conv_net) == one


def test_simulator_does_not_depend_on_torch_threads():
    config = TINY | {"rounds": 2, "dtype": "float64"}
    one = outcome(config, 1)
    torch.set_num_threads(2)
    try:
        assert outcome(config, 1) == one
        assert outcome(config, 2) == one
    finally:
        torch.set_num_threads(1)


@dataclass(frozen=True)
class Generous(Local):
    """A method that offers two models of its only cluster."""

    def round(self, learner, state, data, key):
        zero_C2 = torch.zeros(len(data), 2, dtype=torch.long)
        model_C2P = state.model_CP[:, None].expand(-1, 2, -1)
        yield Exchange(zero_C2, model_C2P, torch.ones(len(data), 2), zero_C2)
        return state


def test_method_that_offers_more_models_than_clusters_is_refused():
    plan = replace(build_experiment(validate(TINY)).plan, algorithm=Generous())
    with closing(Simulator(plan, workers=2)) as engine:
        engine.begin()
        with pytest.raises(MethodError) as caught:
            engine.round(1, Graph.complete(5))
    assert str(caught.value) == (
        "Generous.round yielded an Exchange with K = 2; expected at most 1, the method's "
        "offer_limit."
    )


COUNTS = st.lists(st.integers(min_value=1, max_value=1000), min_size=1, max_size=40)


@given(COUNTS, st.integers(min_value=1, max_value=50))
def test_split_clients_covers_all_clients_once_in_order(counts, workers):
    blocks = split_clients(counts, workers)
    assert [client for block in blocks for client in block] == list(range(len(counts)))
    assert len(blocks) == min(workers, len(counts))
    assert all(len(block) > 0 for block in blocks)


@given(COUNTS, st.integers(min_value=1, max_value=50))
def test_split_clients_exceeds_a_fair_share_by_at_most_one_client(counts, workers):
    blocks = split_clients(counts, workers)
    largest = max(sum(counts[i] for i in block) for block in blocks)
    assert largest <= sum(counts) / len(blocks) + max(counts)


def test_split_clients_by_hand():
    assert split_clients([1, 1, 1, 1], 2) == [range(0, 2), range(2, 4)]
    assert split_clients([100, 1, 1, 1], 2) == [range(0, 1), range(1, 4)]
    assert split_clients([1, 1, 1, 100], 2) == [range(0, 3), range(3, 4)]
    assert split_clients([5, 5, 5], 8) == [range(0, 1), range(1, 2), range(2, 3)]
