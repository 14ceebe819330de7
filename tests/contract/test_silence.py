"""A client whose privacy budget is spent sends nothing more, in a simulation as at a node."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedspd.algorithms import METHODS
from fedspd.core.graph import Graph
from fedspd.engines.simulator import Simulator
from fedspd.privacy.accountant import epsilon
from fedspd.privacy.accounts import Limit
from fedspd.privacy.mechanisms import DPSGD
from fedspd.runtime.plan import Plan
from fedspd.testing import Subject
from fedspd.testing.peers import run_peers
from fedspd.testing.strict_engine import StrictEngine
from fedspd.testing.subject import ROUNDS, path_graph, run

DELTA = 1e-5
MECHANISM = DPSGD.of(noise=2.0, clip=1.0, rate=1.0, epochs=2)
OPTIONS = {
    "fedspd-split": {"warmup": 1, "final_epochs": 1, "prior": False, "check": False},
    "fedspd": {"align_every": 2, "final_epochs": 1, "selection": "uniform"},
    "fedavg": {"finetune": 1},
    "fedper": {},
}


def plan_of(name: str, rounds: int) -> Plan:
    """Return a plan whose budget is spent after so many rounds."""
    plan = Subject(METHODS[name], 2, OPTIONS[name], MECHANISM).plan()
    engine, spent = Simulator(plan), []
    engine.begin()
    for t in range(1, rounds + 1):
        spent += engine.round(t, path_graph()).releases[0]
    return replace(plan, limit=Limit(epsilon(spent, DELTA) + 1e-9, DELTA))


def mute(plan: Plan, engine: Simulator, client: int) -> None:
    """Spend the budget of one client before its first round."""
    spent = [[] for _ in range(plan.clients)]
    spent[client] = [(0.1, 1.0, 1)]
    engine.restore_accounts(spent, {client: 0})


@pytest.mark.parametrize("name", ["fedspd", "fedavg"])
def test_clients_stop_sending_when_their_budget_is_spent_and_go_on_training(name):
    engine = Simulator(plan_of(name, 2))
    engine.begin()
    reports, digests = [], []
    for t in range(1, ROUNDS + 1):
        reports.append(engine.round(t, path_graph()))
        digests.append(engine.digests())
    sent = [sum(len(traffic.transfer_T3) for traffic in report.traffic) for report in reports]
    assert sent[0] > 0
    assert sent[1] > 0
    assert sent[2:] == [0, 0]
    assert [sorted(report.silent) for report in reports] == [[], [], [*range(5)], [*range(5)]]
    assert all(digests[2][c] != digests[3][c] for c in range(5))
    assert reports[3].releases  # trained, though not sent


@pytest.mark.parametrize("name", ["fedspd", pytest.param("fedspd-split", marks=pytest.mark.long)])
def test_silent_clients_are_the_same_with_any_engine_and_at_peers(name):
    """Noise follows from the seed here, so that the bits can be compared."""
    plan = plan_of(name, 2)
    expected = run(Simulator(plan), path_graph())
    assert run(StrictEngine(plan), path_graph()) == expected
    assert run(StrictEngine(plan, [[3, 0], [4, 2, 1]]), path_graph()) == expected
    engine = Simulator(plan, 2)
    assert run(engine, path_graph()) == expected
    engine.close()
    assert run_peers(plan, path_graph(), ROUNDS) == expected


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedper"])
def test_silent_clients_of_other_methods_are_the_same_at_peers(name):
    plan = plan_of(name, 1)
    assert run_peers(plan, path_graph(), ROUNDS) == run(Simulator(plan), path_graph())


@pytest.mark.parametrize("server", [False, True])
def test_neighbours_go_on_without_a_silent_client_which_goes_on_listening(server):
    subject = Subject(METHODS["fedavg"], 1, {}, MECHANISM)
    plan = replace(subject.plan(server=server), limit=Limit(1e9, DELTA))
    every = [(i, j) for i in range(5) for j in range(i)]
    found, own = [], []
    for graph, states in (
        (Graph.from_edges(5, every, "uniform", server), found),
        (Graph.from_edges(5, [], "uniform"), own),
    ):
        engine = Simulator(plan)
        engine.begin()
        mute(plan, engine, 2)
        engine.round(1, graph)
        states.append(engine.block.state.model_CP)
    assert torch.allclose(found[0][0], own[0][[0, 1, 3, 4]].mean(0), atol=1e-5)  # without client 2
    assert torch.allclose(found[0][2], own[0].mean(0), atol=1e-5)  # with its own


def silent_after_round_1(method):
    """Return an engine after round 1, whose client 2 is silent from now on."""
    plan = plan_of(method, 1)
    engine = Simulator(plan)
    engine.begin()
    engine.round(1, path_graph())
    mute(plan, engine, 2)
    return engine


def test_silent_client_wants_everything_where_its_wants_would_tell_of_its_examples():
    engine = silent_after_round_1("fedspd-split")
    announced = engine.block.start_round(2)
    assert (announced.cluster_CK[2] == -1).all()
    assert announced.note_C[2] == 0
    assert announced.want_CM[2].tolist() == [*range(announced.want_CM.shape[1])]
    assert not np.array_equal(announced.want_CM[1], announced.want_CM[2])


def test_silent_client_shares_nothing_with_newcomers():
    shared = silent_after_round_1("fedavg").share()
    assert shared.cluster_CK[:, 0].tolist() == [0, 0, -1, 0, 0]
    assert not shared.model_CKP[2].any()
