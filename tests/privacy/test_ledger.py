"""The ledger of a simulation: who knows of how many releases."""

import numpy as np
import pytest

from fedspd.algorithms import METHODS
from fedspd.core.graph import Graph
from fedspd.core.ledger import SERVER, Traffic
from fedspd.engines.simulator import Simulator
from fedspd.privacy.accountant import epsilon
from fedspd.privacy.ledger import RunLedger, round_entry
from fedspd.privacy.mechanisms import DPSGD
from fedspd.testing import Subject

DELTA = 1e-5
MECHANISM = DPSGD.of(noise=2.0, clip=1.0, rate=0.5, epochs=2)


Pairs = set[tuple[int, int]]


def ledger_after(method: str, graphs: list[Graph], **options: object) -> tuple[RunLedger, Pairs]:
    """Return the ledger of five clients after a round on each graph, and who was sent a model."""
    plan = Subject(METHODS[method], 2, options, MECHANISM).plan(server=graphs[0].server)
    engine, ledger, sent = Simulator(plan), RunLedger(plan.clients, DELTA), set()
    engine.begin()
    for t, graph in enumerate(graphs, 1):
        report = engine.round(t, graph)
        is_public = plan.algorithm.HAS_PUBLIC_ANNOUNCEMENTS
        ledger.add_round(round_entry(report.releases, report.traffic, graph, is_public))
        sent |= {(i, j) for own in report.traffic for i, j, _ in own.transfer_T3.tolist()}
    return ledger, sent


def cost(rounds: int) -> float:
    """Return epsilon of the first rounds; the first one has four epochs, others have two."""
    updates = [MECHANISM.update_release(4 if t == 0 else 2) for t in range(rounds)]
    return epsilon(updates, DELTA)


def test_neighbour_on_a_dynamic_graph_knows_all_rounds_up_to_the_last_that_it_received():
    edges = [[(0, 1)], [(1, 2)], [(0, 2)], []]
    ledger, _ = ledger_after("fedavg", [Graph.from_edges(5, own) for own in edges])
    known = {(0, 1): 1, (1, 0): 1, (1, 2): 2, (2, 1): 2, (0, 2): 3, (2, 0): 3}
    for i in range(5):
        for j in range(5):
            assert ledger.against(i, j) == pytest.approx(cost(known.get((i, j), 0)))
    # round 2 was not sent to client 2 by client 0, nor was round 4 to anyone
    assert [ledger.against_all(i) for i in range(5)] == pytest.approx(
        [cost(3), cost(2), cost(3), 0, 0]
    )


def test_server_knows_every_round():
    every = [(i, j) for i in range(5) for j in range(i)]
    star = Graph.from_edges(5, every, "examples", server=True)
    ledger, _ = ledger_after("fedavg", [star] * 3)
    assert sorted(ledger.received) == [(i, SERVER) for i in range(5)]
    assert ledger.against_all(4) == ledger.against(4, SERVER) == pytest.approx(cost(3))


def test_neighbour_that_is_only_told_of_a_round_pays_unless_that_is_public():
    """In FedSPD, two clients that train other clusters exchange no model."""
    links = {(i, j) for i in range(5) for j in (i - 1, i + 1) if 0 <= j < 5}
    path = [Graph.from_edges(5, [(i, i + 1) for i in range(4)])]
    ledger, sent = ledger_after("fedspd", path, selection="uniform")
    assert sent
    assert set(ledger.received) == sent < links
    # where wants follow from the examples, each neighbour has been told something
    entry = round_entry({}, [Traffic(np.array([[0, 1, 0]]), 1, 8, 16, 4)], path[0], False)
    assert set(map(tuple, entry["received"])) == links
