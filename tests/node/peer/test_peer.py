"""Complete networks of peers in one process: agreement, absence, and return."""

import asyncio
import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chaos.plant import (
    PATIENT,
    QUICK,
    Plant,
    build_config,
    run_all,
    transport_of,
    wait_for_round,
)
from chaos.virtual_time import run_instantly
from fedspd.config import ExperimentConfig
from fedspd.core.errors import UnreachableError
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import Experiment
from fedspd.node.peer.liveness import Timeouts

METHODS = ("fedspd", "fedavg", "fedem", "fedsoft", "ifca", "pfedme")


def simulate(experiment: Experiment) -> list[list[str]]:
    """Return the hash of every client's state after every round and the final phase."""
    engine, found = Simulator(experiment.plan), []
    engine.begin()
    for t in range(1, experiment.config.rounds + 1):
        engine.round(t, experiment.topology.at(t))
        found.append(engine.digests())
    engine.finish(experiment.config.rounds + 1)
    return [*found, engine.digests()]


CONFIGS = {
    **{method: build_config(method) for method in METHODS},
    "metropolis and alignment": build_config(
        topology={"kind": "er", "degree": 3, "weights": "metropolis"}, fedspd={"align_every": 2}
    ),
    "complete, by examples": build_config(
        topology={"kind": "complete", "weights": "examples"},
        fedspd={"first_round": "all", "warmup": 1},
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_peers_equal_the_simulator_to_the_bit_after_every_round(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    plant = Plant(config, tmp_path)
    run_instantly(run_all(plant))
    assert plant.hashes() == simulate(plant.experiment)


def test_peers_send_models_only_to_neighbours_of_the_same_cluster(tmp_path: Path) -> None:
    plant = Plant(build_config(topology={"kind": "complete"}), tmp_path)
    # without heartbeats, whose number depends on the time that it takes
    run_instantly(run_all(plant, dataclasses.replace(PATIENT, heartbeat_interval=600)))
    engine, expected = Simulator(plant.experiment.plan), 0
    engine.begin()
    for t in range(1, plant.config.rounds + 1):
        report = engine.round(t, plant.experiment.topology.at(t))
        expected += sum(traffic.point_to_point_bytes for traffic in report.traffic)
    sent = sum(sum(transport_of(peer).sent.values()) for peer in plant.peers.values())
    # 5 peers have 20 directed links; a parameter has 4 bytes
    all_models = plant.config.rounds * 20 * 4 * plant.experiment.plan.learner.size
    assert expected < all_models
    # the rest are announcements and names
    assert expected < sent < 1.1 * expected + 400 * 20 * plant.config.rounds


def test_peers_continue_without_a_silent_neighbour(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plant = Plant(build_config("fedavg"), tmp_path)

    async def run_without_the_last() -> None:
        brief = dataclasses.replace(QUICK, start=0.3)
        await asyncio.gather(*(plant.run(i, brief) for i in range(4)))

    run_instantly(run_without_the_last())
    # the ring is 0 1 2 3 4
    assert [event["missing"] for event in plant.events(0)[:-1]] == [["n4"]] * 4
    assert [event["missing"] for event in plant.events(1)[:-1]] == [[]] * 4
    assert all(plant.has_finished(i) for i in range(4))
    assert caplog.text.count("neighbour missing: node=n4 round=1 error=") == 2  # n0 and n3


def test_killed_peer_continues_from_its_journal_and_returns_within_two_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plant = Plant(build_config("fedavg", rounds=30, training={"epochs": 1}), tmp_path)

    async def kill_and_restart() -> int:
        others = [asyncio.create_task(plant.run(i)) for i in range(1, 5)]
        victim = asyncio.create_task(plant.run(0))
        await wait_for_round(plant, 0, 3)
        plant.kill(0, victim)
        await wait_for_round(plant, 1, max(plant.rounds(1)) + 3)
        back = max(plant.rounds(1))
        await asyncio.gather(plant.run(0), *others)
        return back

    caplog.set_level("INFO", "fedspd.node")
    back = run_instantly(kill_and_restart())
    assert "neighbour went back" not in caplog.text  # its first heartbeat names its last round
    rounds = plant.rounds(0)
    assert rounds[:3] == [1, 2, 3]  # no committed round is lost
    assert rounds == sorted(set(rounds))
    assert rounds[-1] == 30
    later = [event for event in plant.events(1)[:-1] if event["round"] > back]
    received = [event["round"] for event in later if "n0" in event["received"]]
    assert received[0] <= back + 3  # the round in progress on its return, and two more
    assert len(received) >= 30 - back - 3


def test_peer_that_returns_waits_for_no_neighbour_that_cannot_be_reached(tmp_path: Path) -> None:
    """Its neighbours would wait for it in the meantime, since it greets them."""
    topology = {"kind": "complete"}
    config = build_config("fedavg", rounds=60, topology=topology, training={"epochs": 1})
    plant = Plant(config, tmp_path)
    patient = dataclasses.replace(QUICK, min_deadline=30, max_deadline=40)

    async def kill_two_and_restart_one() -> float:
        tasks = [asyncio.create_task(plant.run(i, patient)) for i in range(5)]
        await wait_for_round(plant, 0, 3)
        for victim in (0, 4):
            plant.kill(victim, tasks[victim])
        before = max(plant.rounds(0))
        await wait_for_round(plant, 1, before + 6)
        started, clock = asyncio.get_running_loop().time(), asyncio.get_running_loop().time
        back = asyncio.create_task(plant.run(0, patient))
        await wait_for_round(plant, 0, before + 1)
        seconds = clock() - started
        await asyncio.gather(back, *tasks[1:4])
        return seconds

    assert run_instantly(kill_two_and_restart_one()) < 5
    assert plant.rounds(0)[-1] == 60


def test_partition_lets_both_sides_continue_and_heals(tmp_path: Path) -> None:
    is_cut = False

    async def cut(sender: str, receiver: str, method: Any) -> None:
        if is_cut and (sender in ("n0", "n1")) != (receiver in ("n0", "n1")):
            raise UnreachableError("the link is down.")

    plant = Plant(build_config("fedavg", rounds=40, training={"epochs": 1}), tmp_path, cut)

    async def cut_and_heal() -> tuple[int, int]:
        nonlocal is_cut
        tasks = [asyncio.create_task(plant.run(i)) for i in range(5)]
        await wait_for_round(plant, 1, 2)
        is_cut = True
        before = [max(plant.rounds(i), default=0) for i in range(5)]
        # the round in progress, one until its deadline, and two more on both sides of the cut
        await asyncio.gather(*(wait_for_round(plant, i, before[i] + 4) for i in range(5)))
        is_cut = False
        healed = max(max(plant.rounds(i)) for i in range(5))
        await asyncio.gather(*tasks)
        return min(before), healed

    before, healed = run_instantly(cut_and_heal())
    assert 1 <= before < healed < 40
    assert any("n2" in event.get("missing", ()) for event in plant.events(1))
    later = [event for event in plant.events(1) if event["round"] > healed]
    received = [event["round"] for event in later if "n2" in event.get("received", ())]
    assert received
    assert received[0] <= healed + 4
    assert all(plant.has_finished(i) for i in range(5))


def test_peers_wait_for_a_slow_neighbour(tmp_path: Path) -> None:
    async def slow_down(sender: str, receiver: str, method: Any) -> None:
        if "n2" in (sender, receiver):
            await asyncio.sleep(0.1)

    plant = Plant(build_config("fedavg"), tmp_path, slow_down)
    run_instantly(run_all(plant))
    assert plant.hashes() == simulate(plant.experiment)


def test_peer_that_missed_deadlines_for_a_while_is_heard_again(tmp_path: Path) -> None:
    """Its messages always take a little longer, so it is never in time unless it is awaited."""
    is_late = False

    async def slow_down(sender: str, receiver: str, method: Any) -> None:
        if is_late and sender == "n0" and method == "Announce":
            raise UnreachableError("the link is full.")
        await asyncio.sleep(0.02 if "n0" in (sender, receiver) else 0.01)

    config = build_config("fedavg", rounds=100, model={"name": "linear"}, training={"epochs": 1})
    plant = Plant(config, tmp_path, slow_down)

    async def fill_a_link() -> int:
        nonlocal is_late
        tasks = [asyncio.create_task(plant.run(i)) for i in range(5)]
        await wait_for_round(plant, 1, 3)
        is_late = True
        await wait_for_round(plant, 1, 10)  # with several deadlines that n0 has missed
        is_late = False
        over = max(plant.rounds(1))
        await asyncio.gather(*tasks)
        return over

    over = run_instantly(fill_a_link())
    for neighbour in (1, 4):
        rounds = [event for event in plant.events(neighbour) if event["event"] == "round"]
        assert not any("n0" in event["received"] for event in rounds[5:over])
        assert all("n0" in event["received"] for event in rounds[over + 20 :])


def test_peer_that_returns_to_its_only_live_neighbour_skips_to_its_round(tmp_path: Path) -> None:
    """Its other neighbour is gone for good.

    At first the peer lags, since that neighbour might be late and the live one Byzantine.
    """
    model, training = {"name": "linear"}, {"epochs": 1}
    config = build_config("fedavg", clients=3, rounds=70, model=model, training=training)
    plant = Plant(config, tmp_path)
    brief = Timeouts(
        start=1.0,
        min_deadline=0.1,
        max_deadline=0.3,
        heartbeat_interval=0.05,
        down_after=0.6,
        linger=0.2,
    )

    async def fall_behind() -> None:
        tasks = [asyncio.create_task(plant.run(i, brief)) for i in range(2)]
        await wait_for_round(plant, 1, 3)
        plant.kill(1, tasks[1])
        await wait_for_round(plant, 0, 45)
        await asyncio.gather(plant.run(1, brief), tasks[0])

    run_instantly(fall_behind())
    last = [event for event in plant.events(1) if event["event"] == "round"][-1]
    assert max(later - round for round, later in pairwise(plant.rounds(1))) > 5
    assert (last["round"], last["received"]) == (70, ["n0"])


def test_peers_that_are_done_and_start_again_are_no_offenders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their heartbeats name the final phase: neighbours mute one that names a later round."""
    plant = Plant(build_config("fedavg", rounds=2, training={"epochs": 1}), tmp_path)
    caplog.set_level("INFO", "fedspd.node")
    for _ in range(2):
        run_instantly(run_all(plant))
        for peer in plant.peers.values():
            peer.journal.close()
    assert all(plant.rounds(i) == [1, 2] for i in range(5))
    assert "message rejected" not in caplog.text
    assert "call failed" not in caplog.text
