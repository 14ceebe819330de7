"""Every method with a model of which only a part travels: adapters on frozen layers."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.contract.conftest import CLASSES, OPTIONS
from torch import nn

from fedspd.algorithms import METHODS
from fedspd.core.errors import ConfigError, MethodError
from fedspd.core.exchange import Exchange, ExchangeOptions, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.travel import Home
from fedspd.engines.simulator import Simulator
from fedspd.runtime.silence import Withheld, restore_own, withhold
from fedspd.testing import Subject
from fedspd.testing.checks import (
    check_blocks_do_not_matter,
    check_engines_agree,
    check_isolated_client_trains_alone,
    check_newcomers_join,
    check_peers_agree,
    check_resume_is_exact,
    check_states_are_finite,
    check_strangers_do_not_matter,
)
from fedspd.testing.subject import FEATURES

CHECKS = (
    check_blocks_do_not_matter,
    check_engines_agree,
    check_isolated_client_trains_alone,
    check_newcomers_join,
    check_peers_agree,
    check_resume_is_exact,
    check_states_are_finite,
    check_strangers_do_not_matter,
)


def load_example():
    path = Path(__file__).parents[2] / "examples" / "own_adapter.py"
    spec = importlib.util.spec_from_file_location("own_adapter", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LowRank = load_example().LowRank


def adapted(outputs):
    """Return the example's layer with a personal layer before the head: it stays at home."""
    personal = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU())
    return nn.Sequential(LowRank(nn.Linear(FEATURES, 5), 2), personal, nn.Linear(5, outputs))


TRAVELS = ExchangeOptions(only=["0", "2"])  # adapter and head; the frozen layer of 0 does not
SUBJECTS = {
    name: Subject(cls, 2, OPTIONS.get(name, {}), model=adapted, exchange=TRAVELS)
    for name, cls in CLASSES.items()
}


@pytest.mark.parametrize("check", [check_engines_agree, check_newcomers_join, check_peers_agree])
@pytest.mark.parametrize("name", ["fedavg", "fedspd"])
def test_method_keeps_its_contract_where_a_part_of_the_model_travels(name, check):
    check(SUBJECTS[name])


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_method_keeps_its_contract_where_a_part_of_the_model_travels(name, check):
    check(SUBJECTS[name])


def complete_run(name, rounds=2, **changes):
    """Return an engine after rounds on a complete graph, and the report of the last one."""
    engine = Simulator(SUBJECTS[name].plan(**changes))
    engine.begin()
    for t in range(1, rounds + 1):
        report = engine.round(t, Graph.complete(5))
    return engine, report


def test_fedavg_averages_what_travels_and_keeps_the_rest():
    engine, report = complete_run("fedavg")
    plan, model_CP = engine.plan, engine.block.state.model_CP
    travels_P, W = plan.travel.travels_P, plan.learner.weights
    assert (model_CP[:, travels_P] == model_CP[:1, travels_P]).all()
    personal = ~travels_P[:W]
    trained = model_CP[:, :W][:, personal]
    assert len(trained.unique(dim=0)) == 5
    # adapter 2 x 4 and 5 x 2, head 5 x 3 and 3: float32
    assert int(travels_P.sum()) == 8 + 10 + 18
    assert [traffic.model_bytes for traffic in report.traffic] == [4 * 36]


def test_frozen_parameters_keep_their_bits_and_never_travel():
    subject = Subject(METHODS["fedavg"], model=adapted)  # without exchange.only
    engine = Simulator(subject.plan())
    engine.begin()
    frozen = slice(engine.plan.learner.weights, engine.plan.learner.parameter_count)
    before_CF = engine.block.state.model_CP[:, frozen].clone()
    report = engine.round(1, Graph.complete(5))
    assert torch.equal(engine.block.state.model_CP[:, frozen], before_CF)
    size = engine.plan.learner.size - before_CF.shape[1]
    assert before_CF.shape[1] == 4 * 5 + 5
    assert report.traffic[0].model_bytes == 4 * size


def test_ifca_keeps_the_home_part_of_clusters_that_it_did_not_train():
    engine, _ = complete_run("ifca", rounds=1)
    first = Simulator(SUBJECTS["ifca"].plan())
    first.begin()
    before, state = first.block.state, engine.block.state
    home_P = ~engine.plan.travel.travels_P
    for c, chosen in enumerate(before.mixture_CS.argmax(1).tolist()):
        other = 1 - chosen
        assert torch.equal(
            state.centers_CSP[c, other, home_P], before.centers_CSP[c, other, home_P]
        )


def test_silent_client_keeps_what_stays_at_home():
    """Client 0 sends nothing: it averages its own 1 with client 1's 3, and keeps its own 7."""
    full_CKL = torch.tensor([[[1.0, 7.0]], [[3.0, 9.0]]])
    only_C1, weight_C1 = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
    offered = Exchange(only_C1, full_CKL[:, :, :1], weight_C1, only_C1)
    sent = withhold(offered, [0], has_public_wants=True)
    answer = Neighbourhood.of(Graph.complete(2), [0, 1], sent)
    answer = restore_own(answer, Withheld.of(offered, [0], [0, 1]))
    answer = replace(answer, home=Home(torch.tensor([True, False]), full_CKL))
    assert answer.mean(only_C1).model_CMP.tolist() == [[[2.0, 7.0]], [[3.0, 9.0]]]


def test_average_of_centers_keeps_numbers_at_home_of_the_own_offer_or_else_of_the_own_center():
    """Each client offers another cluster: its trained number stays, and not the one before."""
    full_CKL = torch.tensor([[[10.0, 20.0]], [[30.0, 40.0]]])
    cluster_C1, weight_C1 = torch.tensor([[0], [1]]), torch.ones(2, 1)
    offered = Exchange(cluster_C1, full_CKL[:, :, :1], weight_C1, cluster_C1)
    answer = Neighbourhood.of(Graph.from_edges(2, [(0, 1)]), [0, 1], offered)
    answer = replace(answer, home=Home(torch.tensor([True, False]), full_CKL))
    centers_CSP = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    found = answer.average_centers(centers_CSP)
    assert found.tolist() == [[[10.0, 20.0], [30.0, 4.0]], [[10.0, 6.0], [30.0, 40.0]]]


def test_consensus_counts_what_travels_alone():
    engine, _ = complete_run("fedem")
    assert engine.measure().moments.consensus_distance().max() < 1e-6


@pytest.mark.parametrize(
    ("name", "only", "sentence"),
    [
        ("fedavg", ["3"], "exchange.only = '3': not a module .*expected one of: 0, "),
        ("fedavg", ["0.layer"], "nothing is left to travel, since frozen parameters never do"),
        ("facade", ["0"], "the model's head does not travel, but FACADE needs the heads"),
        ("fedspd-split", ["0"], "but FedSPDSplit needs the heads of neighbours"),
        ("fedper", ["2"], "nothing is left to travel, since the head stays at home with FedPer"),
    ],
)
def test_modules_that_cannot_be_chosen_are_refused_in_one_sentence(name, only, sentence):
    subject = Subject(METHODS[name], model=adapted, exchange=ExchangeOptions(only=only))
    with pytest.raises(ConfigError, match=sentence):
        subject.plan()


def test_vectors_that_are_no_models_are_refused():
    class Halves(METHODS["fedavg"]):
        def round(self, learner, state, data, key):
            only_C1 = torch.zeros(len(data), 1, dtype=torch.long)
            half = state.model_CP[:, None, : learner.size // 2]
            yield Exchange(only_C1, half, data.counts_C[:, None], only_C1)
            return state

    engine = Simulator(Subject(Halves, model=adapted, exchange=TRAVELS).plan())
    engine.begin()
    with pytest.raises(MethodError, match=r"so exchange\.only cannot divide them"):
        engine.round(1, Graph.complete(5))
