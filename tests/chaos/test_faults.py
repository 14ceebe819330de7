"""Real peers in network namespaces: killed, parted, and together again. All faults at length: make chaos."""

import time

import pytest

from chaos import __main__ as chaos
from chaos.faults import SCENARIOS
from chaos.fleet import Fleet
from chaos.hosts import Hosts, why_not
from chaos.measures import lost, out_of_order, read
from chaos.relay import Relay

NAMES = [scenario.name for scenario in SCENARIOS]


@pytest.fixture(autouse=True, scope="module")
def _namespaces() -> None:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")


def hear_each_other(fleet: Fleet, after: float) -> bool:
    return all(
        set(fleet.hearing(name, after)) == set(near) for name, near in fleet.neighbours.items()
    )


def test_a_killed_node_and_a_short_partition_cost_nothing_that_was_committed(tmp_path):
    config = chaos.config(tmp_path, {}, nodes=4, rounds=10_000)
    with (
        Hosts(4) as hosts,
        Relay(hosts.machines),
        Fleet(config, tmp_path / "plant", hosts.machines) as fleet,
    ):
        fleet.until(lambda: fleet.everyone_at(2))
        fleet.kill("node-1")
        restarted = fleet.restart("node-1")
        fleet.until(lambda: hear_each_other(fleet, restarted))

        hosts.cable("down")
        fleet.pause(2.0)
        hosts.cable("up")
        healed = time.monotonic()
        fleet.until(lambda: hear_each_other(fleet, healed))
        fleet.leave()
    journals = read(fleet)
    assert [*lost(fleet), *out_of_order(journals)] == []
    assert len(fleet.kills) == 1
    heard_in = min(seen.event["round"] for seen in fleet.hearing("node-1", restarted).values())
    assert heard_in <= fleet.of("node-1", restarted)[0].event["round"] + 1
    assert all(events[-1]["accuracy"] > 0.6 for events in journals.values())


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_every_fault_is_survived(name, tmp_path):
    (row,) = chaos.run([scenario for scenario in SCENARIOS if scenario.name == name], tmp_path)
    assert row["problems"] == []
