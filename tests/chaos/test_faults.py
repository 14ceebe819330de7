"""Real peers in network namespaces, killed and partitioned; `make chaos` runs all scenarios."""

import time

import pytest

from chaos import __main__ as chaos
from chaos.faults import SCENARIOS
from chaos.fleet import Fleet
from chaos.hosts import NamespaceNetwork, missing_requirement
from chaos.measures import find_disordered_rounds, find_lost_rounds, read_journals
from chaos.relay import Relay

NAMES = [scenario.name for scenario in SCENARIOS]


@pytest.fixture(autouse=True, scope="module")
def _namespaces() -> None:
    if problem := missing_requirement():
        pytest.skip(f"network namespaces are not available: {problem}")


def all_receive(fleet: Fleet, after: float) -> bool:
    """Return whether every node has received from all its neighbours after some time."""
    return all(
        set(fleet.first_with(name, after)) == set(neighbours)
        for name, neighbours in fleet.neighbours.items()
    )


def test_killed_node_and_short_partition_lose_no_committed_round(tmp_path):
    config = chaos.build_config(tmp_path, {}, nodes=3, rounds=10_000)
    with (
        NamespaceNetwork(3) as network,
        Relay(network.hosts),
        Fleet(config, tmp_path / "plant", network.hosts) as fleet,
    ):
        fleet.wait_until(lambda: fleet.has_reached(2))
        fleet.kill("node-1")
        restarted = fleet.restart("node-1")
        fleet.wait_until(lambda: all_receive(fleet, restarted))

        network.set_cable("down")
        fleet.wait_for(2.0)
        network.set_cable("up")
        mended = time.monotonic()
        fleet.wait_until(lambda: all_receive(fleet, mended))
        fleet.stop()
    journals = read_journals(fleet)
    assert [*find_lost_rounds(fleet), *find_disordered_rounds(journals)] == []
    assert len(fleet.kills) == 1
    received = fleet.first_with("node-1", restarted).values()
    first_own_round = fleet.observations_of("node-1", restarted)[0].event["round"]
    assert min(seen.event["round"] for seen in received) <= first_own_round + 1
    assert all(events[-1]["accuracy"] > 0.6 for events in journals.values())


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_network_survives_every_scenario(name, tmp_path):
    (row,) = chaos.run([scenario for scenario in SCENARIOS if scenario.name == name], tmp_path)
    assert row["problems"] == []
