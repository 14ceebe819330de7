"""Complete networks of peers in one process.

The peers use the in-memory transport, which encodes and checks every message as on the wire.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fedspd.config import ExperimentConfig, as_dict, validate
from fedspd.core.errors import NodeError, RejectedError, StorageError, UnreachableError
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import Experiment, build_experiment
from fedspd.node.identity.manifest import Manifest, Member
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.wire.memory import (
    MemoryNetwork,
    MemoryTransport,
    NetworkConditions,
    ideal_conditions,
)
from fedspd.node.wire.messages import JOINING, Offer, Request
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json

Value = TypeVar("Value")
QUICK = Timeouts(
    start=20,
    min_deadline=0.5,
    max_deadline=20,
    heartbeat_interval=0.1,
    down_after=1.0,
    linger=0.5,
)
# where no peer fails, a busy machine must not make one seem to
PATIENT = Timeouts(
    start=600,
    min_deadline=600,
    max_deadline=600,
    budget=600,
    heartbeat_interval=0.1,
    down_after=600,
    linger=0.5,
)
METHODS = ("fedspd", "fedavg", "fedem", "fedsoft", "ifca", "pfedme")


def build_config(method: str = "fedspd", **changes: Any) -> ExperimentConfig:
    tree = {
        "method": method,
        "clients": 5,
        "clusters": 1 if method == "fedavg" else 2,
        "rounds": 4,
        "data": {"name": "digits", "examples": 30},
        "topology": {"kind": "ring"},
        "model": {"name": "mlp", "hidden": 8},
    }
    return validate({**tree, **changes})


class Plant:
    """The peers of one config, their folders and the network between them."""

    def __init__(
        self,
        config: ExperimentConfig,
        folder: Path,
        conditions: NetworkConditions = ideal_conditions,
    ) -> None:
        self.config, self.folder = config, folder
        self.experiment: Experiment = build_experiment(config)
        self.graph = self.experiment.topology.at(1)
        self.network = MemoryNetwork(conditions)
        self.peers: dict[int, Peer] = {}
        self.links = {i: [int(j) for j in self.graph.neighbours(i)] for i in range(config.clients)}

    def manifest(self) -> Manifest:
        federation, plan, config = self.experiment.federation, self.experiment.plan, self.config
        about = as_dict(config), federation.shape, federation.classes
        learner, algorithm = plan.learner, plan.algorithm
        limits = max(1, algorithm.offer_limit), algorithm.size_limit(learner), plan.train.diameter
        shared = *about, learner.size, *limits, config.dtype
        return Manifest("0" * 32, False, *shared, self.members())

    def members(self) -> tuple[Member, ...]:
        return tuple(
            Member(f"n{i}", i, f"host:{7000 + i}", tuple(f"n{j}" for j in near), i + 1)
            for i, near in self.links.items()
        )

    def build(self, i: int, timeouts: Timeouts = QUICK) -> Peer:
        """Return peer i, which begins or continues from its journal."""
        manifest, clients, name = self.manifest(), self.config.clients, f"n{i}"
        context = NodeContext(
            name=name,
            client=i,
            address=f"host:{7000 + i}",
            neighbours={f"n{j}": j for j in self.links[i]},
            agreement=manifest.agreement,
            rounds=self.config.rounds,
            rule=self.graph.rule,
            evaluate_every=1,
            is_newcomer=i >= clients,
        )
        owner = {"network": manifest.network, "node": name, "agreement": manifest.agreement}
        journal = Journal(self.folder / name, owner)
        shard = range(i % clients, i % clients + 1)
        plan = build_experiment(self.config).plan.select_clients(shard)
        block = dataclasses.replace(plan.train, clients=[i], network_size=max(clients, i + 1))
        runner = BlockRunner(dataclasses.replace(plan, train=block))
        transport = self.network.transport(manifest, name)
        self.peers[i] = Peer(context, runner, journal, transport, timeouts)
        return self.peers[i]

    def run(self, i: int, timeouts: Timeouts = QUICK) -> Coroutine[Any, Any, None]:
        return self.build(i, timeouts).run()

    def kill(self, i: int, task: "asyncio.Task[None]") -> None:
        """End a peer like kill -9: no neighbour is told, and uncommitted work is lost."""
        task.cancel()
        self.network.disconnect(f"n{i}")
        self.peers[i].journal.close()

    def introduce(self, i: int, neighbours: list[int]) -> None:
        """Link a newcomer and give its neighbours the new manifest."""
        self.links[i] = neighbours
        for j in neighbours:
            transport = transport_of(self.peers[j])
            transport.manifest = dataclasses.replace(transport.manifest, members=self.members())

    def events(self, i: int) -> list[Json]:
        return list(self.peers[i].journal.run_folder.events())

    def rounds(self, i: int) -> list[int]:
        return [event["round"] for event in self.events(i) if event["event"] == "round"]

    def hashes(self) -> list[list[str]]:
        """Return the hash of every peer's state after every round and the final phase."""
        found = [[event["hash"] for event in self.events(i)] for i in range(self.config.clients)]
        return [list(row) for row in zip(*found, strict=True)]

    def has_finished(self, i: int) -> bool:
        return bool(self.events(i)[-1]["event"] == "final")


def transport_of(peer: Peer) -> MemoryTransport:
    assert isinstance(peer.protocol.transport, MemoryTransport)
    return peer.protocol.transport


def run_peers(work: Coroutine[Any, Any, Value]) -> Value:
    """Run peers that compute in turn, since peers in one process share torch's random numbers."""

    async def run_in_turn() -> Value:
        with ThreadPoolExecutor(1) as executor:
            asyncio.get_running_loop().set_default_executor(executor)
            return await work

    return asyncio.run(run_in_turn())


async def run_all(plant: Plant, timeouts: Timeouts = PATIENT) -> None:
    await asyncio.gather(*(plant.run(i, timeouts) for i in range(plant.config.clients)))


async def wait_for_round(plant: Plant, i: int, round: int) -> None:
    async with asyncio.timeout(600):
        while not any(event["round"] >= round for event in plant.events(i)):
            await asyncio.sleep(0.01)


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
    run_peers(run_all(plant))
    assert plant.hashes() == simulate(plant.experiment)


def test_peers_send_models_only_to_neighbours_of_the_same_cluster(tmp_path: Path) -> None:
    plant = Plant(build_config(topology={"kind": "complete"}), tmp_path)
    # without heartbeats, whose number depends on the time that it takes
    run_peers(run_all(plant, dataclasses.replace(PATIENT, heartbeat_interval=600)))
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


def test_peers_continue_without_a_silent_neighbour(tmp_path: Path) -> None:
    plant = Plant(build_config("fedavg"), tmp_path)

    async def run_without_the_last() -> None:
        brief = dataclasses.replace(QUICK, start=0.3)
        await asyncio.gather(*(plant.run(i, brief) for i in range(4)))

    run_peers(run_without_the_last())
    # the ring is 0 1 2 3 4
    assert [event["missing"] for event in plant.events(0)[:-1]] == [["n4"]] * 4
    assert [event["missing"] for event in plant.events(1)[:-1]] == [[]] * 4
    assert all(plant.has_finished(i) for i in range(4))


def test_killed_peer_continues_from_its_journal_and_returns_within_two_rounds(
    tmp_path: Path,
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

    back = run_peers(kill_and_restart())
    rounds = plant.rounds(0)
    assert rounds[:3] == [1, 2, 3]  # no committed round is lost
    assert rounds == sorted(set(rounds))
    assert rounds[-1] == 30
    later = [event for event in plant.events(1)[:-1] if event["round"] > back]
    received = [event["round"] for event in later if "n0" in event["received"]]
    assert received[0] <= back + 3  # the round in progress on its return, and two more
    assert len(received) >= 30 - back - 3


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

    before, healed = run_peers(cut_and_heal())
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
    run_peers(run_all(plant))
    assert plant.hashes() == simulate(plant.experiment)


async def run_with_newcomer(plant: Plant, prepare: Callable[[], None] = lambda: None) -> None:
    """Let node 5 join three of five running peers; prepare before it asks for their models."""
    tasks = [asyncio.create_task(plant.run(i)) for i in range(5)]
    await wait_for_round(plant, 1, 3)
    plant.introduce(5, [0, 1, 2])
    prepare()
    await asyncio.gather(plant.run(5), *tasks)


def test_newcomer_takes_the_models_of_its_neighbours_and_takes_part(tmp_path: Path) -> None:
    plant = Plant(build_config(rounds=25), tmp_path)
    run_peers(run_with_newcomer(plant))
    rounds = plant.rounds(5)
    assert rounds[0] >= 3
    assert rounds[-1] == 25
    assert any("n5" in event.get("received", ()) for event in plant.events(0))
    assert plant.has_finished(5)
    losses = [event["loss"] for event in plant.events(5)]
    assert losses[0] < 2.1  # a guess has ln 10 = 2.303, so it did not start from scratch
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "method",
    [
        *("fedavg", "fedper", "fedem", "local"),
        *(pytest.param(m, marks=pytest.mark.long) for m in ("fedsoft", "ifca", "facade", "pfedme")),
    ],
)
def test_newcomer_joins_with_any_method(tmp_path: Path, method: str) -> None:
    """A method shares one model, its body, all clusters or nothing, even if clusters = 2."""
    model, training = {"name": "linear"}, {"epochs": 1}
    if method in ("facade", "fedper"):  # a body needs another layer
        model = {"name": "mlp", "hidden": 4}
    config = build_config(method, clusters=2, rounds=20, model=model, training=training)
    plant = Plant(config, tmp_path)
    run_peers(run_with_newcomer(plant))
    assert plant.rounds(5)[0] >= 3
    assert plant.has_finished(5)


def test_newcomer_ignores_a_neighbour_that_offers_too_few_clusters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Plant(build_config(rounds=25), tmp_path)

    def offer_one_cluster() -> None:
        protocol = plant.peers[0].protocol
        honest = protocol._offer_to_newcomer
        monkeypatch.setattr(
            protocol,
            "_offer_to_newcomer",
            lambda *about: Offer((0,), honest(*about).model_KP[:1]),
        )

    with caplog.at_level("INFO"):
        run_peers(run_with_newcomer(plant, offer_one_cluster))
    assert 'node=n0 error="offers a newcomer the clusters [0]; expected [0, 1]."' in caplog.text
    assert "network joined: node=n5 neighbours=2" in caplog.text
    assert plant.has_finished(5)


def test_newcomer_with_one_live_neighbour_of_two_starts_in_its_round(tmp_path: Path) -> None:
    complete, one_epoch = {"kind": "complete"}, {"epochs": 1}
    config = build_config("fedavg", clients=2, rounds=40, topology=complete, training=one_epoch)
    plant = Plant(config, tmp_path)

    async def join_one_of_two() -> None:
        tasks = [asyncio.create_task(plant.run(i)) for i in range(2)]
        await wait_for_round(plant, 0, 5)
        plant.kill(1, tasks[1])
        plant.introduce(2, [0, 1])
        await asyncio.gather(plant.run(2), tasks[0])

    run_peers(join_one_of_two())
    assert plant.rounds(2)[0] >= 5
    assert plant.rounds(2)[-1] == 40


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

    def run_slowly(i: int) -> Coroutine[Any, Any, None]:
        peer = plant.build(i, brief)
        start_round = peer.runner.start_round

        def start_late(round: int) -> Any:
            time.sleep(0.03)
            return start_round(round)

        peer.runner.start_round = start_late  # type: ignore[method-assign]
        return peer.run()

    async def fall_behind() -> None:
        tasks = [asyncio.create_task(run_slowly(i)) for i in range(2)]
        await wait_for_round(plant, 1, 3)
        plant.kill(1, tasks[1])
        await wait_for_round(plant, 0, 45)
        await asyncio.gather(run_slowly(1), tasks[0])

    run_peers(fall_behind())
    last = [event for event in plant.events(1) if event["event"] == "round"][-1]
    assert max(later - round for round, later in pairwise(plant.rounds(1))) > 5
    assert (last["round"], last["received"]) == (70, ["n0"])


def test_newcomer_leaves_while_it_waits_for_neighbours(tmp_path: Path) -> None:
    plant = Plant(build_config(), tmp_path)
    plant.links[5] = [0, 1]
    newcomer = plant.build(5)
    newcomer.leave()
    run_peers(newcomer.run())
    assert plant.events(5) == []


def test_newcomer_without_a_live_neighbour_fails(tmp_path: Path) -> None:
    plant = Plant(build_config(), tmp_path)
    plant.links[5] = [0, 1]
    with pytest.raises(NodeError, match="No neighbour gave its models"):
        run_peers(plant.run(5))


def test_peer_does_not_share_untrained_models_while_it_reads_its_journal(tmp_path: Path) -> None:
    """Neighbours ask from the moment that the peer listens."""
    plant = Plant(build_config("fedavg"), tmp_path)
    runner = plant.build(0).runner
    with pytest.raises(StorageError, match="has 0 of 1 clients"):
        runner.load(tmp_path)  # there is no checkpoint, so it ends in the middle
    assert runner.state is None
    request = Request(0, JOINING, (0,), runner.plan.learner.size)
    with pytest.raises(RejectedError, match="has not begun yet"):
        plant.peers[0].protocol.handle_request("n1", request)


def test_leaving_peer_commits_its_round_and_continues_at_the_next_start(tmp_path: Path) -> None:
    plant = Plant(build_config("fedavg", rounds=12), tmp_path)

    async def leave_early() -> None:
        tasks = [asyncio.create_task(plant.run(i)) for i in range(5)]
        await wait_for_round(plant, 0, 4)
        for peer in plant.peers.values():
            peer.leave()
        await asyncio.gather(*tasks)

    run_peers(leave_early())
    done = [plant.rounds(i) for i in range(5)]
    for peer in plant.peers.values():
        peer.journal.close()
    assert all(4 <= max(rounds) < 12 for rounds in done)
    run_peers(run_all(plant))
    assert all(plant.rounds(i)[: len(done[i])] == done[i] for i in range(5))
    assert all(plant.rounds(i)[-1] == 12 for i in range(5))


def test_journal_refuses_a_folder_of_another_agreement(tmp_path: Path) -> None:
    Journal(tmp_path / "x", {"network": "a", "node": "n0", "agreement": "1"}).close()
    with pytest.raises(StorageError, match="belongs to another agreement"):
        Journal(tmp_path / "x", {"network": "a", "node": "n0", "agreement": "2"})


@pytest.mark.parametrize(
    ("kept", "factor"), [(10, 1.0), (None, 2.0)], ids=["fewer examples", "other examples"]
)
def test_journal_refuses_data_that_changed_since_the_last_round(
    kept: int | None, factor: float, tmp_path: Path
) -> None:
    plant = Plant(build_config(rounds=1), tmp_path)
    run_peers(run_all(plant))
    plant.peers[0].journal.close()
    peer = plant.build(0)
    train = peer.runner.plan.train
    then, now = len(train.y[0]), len(train.y[0][:kept])
    changed = dataclasses.replace(train, x=[train.x[0][:kept] * factor], y=[train.y[0][:kept]])
    peer.runner.plan = dataclasses.replace(peer.runner.plan, train=changed)
    sentence = rf"have changed since the last round \({then} examples then, {now} now\)"
    with pytest.raises(StorageError, match=sentence):
        run_peers(peer.run())


def test_damaged_journal_stops_the_peer_and_stays_as_it_is(tmp_path: Path) -> None:
    plant = Plant(build_config("fedavg", rounds=1), tmp_path)
    run_peers(run_all(plant))
    part = next((tmp_path / "n0" / "checkpoints").rglob("*.safetensors"))
    content = part.read_bytes()
    damaged = content[:-1] + bytes([content[-1] ^ 1])
    part.write_bytes(damaged)
    plant.peers[0].journal.close()
    with pytest.raises(StorageError, match="missing or damaged"):
        run_peers(plant.run(0))
    assert part.read_bytes() == damaged
