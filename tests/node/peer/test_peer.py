"""Whole networks of peers in one process, over the in-memory transport: every message is encoded and checked as on the wire."""

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
from fedspd.node.wire.memory import MemoryNetwork, NetworkConditions, ideal_conditions
from fedspd.node.wire.messages import JOINING, Offer, Request
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json

Found = TypeVar("Found")
QUICK = Timeouts(start=20, least=0.5, most=20, beat=0.1, silence=1.0, leave=0.5)
PATIENT = Timeouts(
    start=120, least=60, most=60, beat=0.1, silence=60, leave=0.5
)  # where nobody fails, nobody may be left out
EXCHANGING = ("fedspd", "fedavg", "fedem", "fedsoft", "ifca", "pfedme")


def config_of(method: str = "fedspd", **changes: Any) -> ExperimentConfig:
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
        learner, federation = self.experiment.plan.learner, self.experiment.federation
        about = (
            as_dict(self.config),
            federation.shape,
            federation.classes,
            learner.size,
            self.config.dtype,
        )
        return Manifest("0" * 32, False, *about, self.listed())

    def listed(self) -> tuple[Member, ...]:
        return tuple(
            Member(f"n{i}", i, f"host:{7000 + i}", tuple(f"n{j}" for j in near), i + 1)
            for i, near in self.links.items()
        )

    def start(self, i: int, patience: Timeouts = QUICK) -> Peer:
        """A peer that begins, or goes on from its journal."""
        manifest, near = self.manifest(), {f"n{j}": j for j in self.links[i]}
        config = self.config
        place = NodeContext(
            f"n{i}",
            i,
            f"host:{7000 + i}",
            near,
            manifest.agreement,
            config.rounds,
            self.graph.rule,
            1,
            i >= config.clients,
        )
        journal = Journal(
            self.folder / f"n{i}",
            {"network": manifest.network, "node": place.name, "agreement": manifest.agreement},
        )
        plan = build_experiment(config).plan.select_clients(
            range(i % config.clients, i % config.clients + 1)
        )
        block = dataclasses.replace(
            plan.train, clients=[i], network_size=max(config.clients, i + 1)
        )
        runner = BlockRunner(dataclasses.replace(plan, train=block))
        transport = self.network.transport(manifest, place.name)
        self.peers[i] = Peer(place, runner, journal, transport, patience)
        return self.peers[i]

    def live(self, i: int, patience: Timeouts = QUICK) -> Coroutine[Any, Any, None]:
        return self.start(i, patience).live()

    def kill(self, i: int, task: "asyncio.Task[None]") -> None:
        """As kill -9 does: nothing is said to anybody, and what is not committed is lost."""
        task.cancel()
        self.network.disconnect(f"n{i}")
        self.peers[i].journal.close()

    def events(self, i: int) -> list[Json]:
        return list(self.peers[i].journal.record.events())

    def rounds(self, i: int) -> list[int]:
        return [event["round"] for event in self.events(i) if event["event"] == "round"]


def together(work: Coroutine[Any, Any, Found]) -> Found:
    """Many peers in one process share torch's random numbers, so that only one of them may compute at a time."""

    async def one_at_a_time() -> Found:
        with ThreadPoolExecutor(1) as executor:
            asyncio.get_running_loop().set_default_executor(executor)
            return await work

    return asyncio.run(one_at_a_time())


async def all_of(plant: Plant, patience: Timeouts = PATIENT) -> None:
    await asyncio.gather(*(plant.live(i, patience) for i in range(plant.config.clients)))


async def reaches(plant: Plant, i: int, round: int) -> None:
    async with asyncio.timeout(60):
        while not any(event["round"] >= round for event in plant.events(i)):
            await asyncio.sleep(0.01)


def simulated(experiment: Experiment) -> list[list[str]]:
    """The hash of every client's state after every round, and after the final phase."""
    engine, found = Simulator(experiment.plan), []
    engine.begin()
    for t in range(1, experiment.config.rounds + 1):
        engine.round(t, experiment.topology.at(t))
        found.append(engine.digests())
    engine.finish(experiment.config.rounds + 1)
    return [*found, engine.digests()]


@pytest.mark.parametrize(
    "config",
    [
        *(config_of(method) for method in EXCHANGING),
        config_of(
            topology={"kind": "er", "degree": 3, "weights": "metropolis"}, fedspd={"align_every": 2}
        ),
        config_of(
            topology={"kind": "complete", "weights": "examples"},
            fedspd={"first_round": "all", "warmup": 1},
        ),
    ],
    ids=[*EXCHANGING, "metropolis and alignment", "complete, by examples"],
)
def test_peers_are_the_simulation_to_the_bit_after_every_round(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    plant = Plant(config, tmp_path)
    together(all_of(plant))
    found = [[event["hash"] for event in plant.events(i)] for i in range(config.clients)]
    assert [list(row) for row in zip(*found, strict=True)] == simulated(plant.experiment)


def test_models_go_only_to_neighbours_that_trained_the_same_cluster(tmp_path: Path) -> None:
    plant = Plant(config_of(topology={"kind": "complete"}), tmp_path)
    together(all_of(plant))
    engine, expected = Simulator(plant.experiment.plan), 0
    engine.begin()
    for t in range(1, plant.config.rounds + 1):
        report = engine.round(t, plant.experiment.topology.at(t))
        expected += sum(traffic.point_to_point_bytes for traffic in report.traffic)
    sent = sum(sum(peer.talk.transport.sent.values()) for peer in plant.peers.values())  # type: ignore[attr-defined]
    models = (
        plant.config.rounds * 20 * 4 * plant.experiment.plan.learner.size
    )  # if everybody sent to everybody
    assert expected < models
    assert (
        expected < sent < 1.1 * expected + 400 * 20 * plant.config.rounds
    )  # the rest: announcements, heartbeats and names


def test_a_silent_neighbour_is_left_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    plant = Plant(config_of("fedavg"), tmp_path)

    async def without_the_last() -> None:
        await asyncio.gather(
            *(plant.live(i, dataclasses.replace(QUICK, start=0.3)) for i in range(4))
        )

    together(without_the_last())
    assert [event["missing"] for event in plant.events(0)[:-1]] == [
        ["n4"]
    ] * 4  # on the ring 0 1 2 3 4
    assert [event["missing"] for event in plant.events(1)[:-1]] == [[]] * 4
    assert all(plant.events(i)[-1]["event"] == "final" for i in range(4))


def test_a_killed_node_goes_on_from_its_journal_and_is_heard_again_within_two_rounds(
    tmp_path: Path,
) -> None:
    plant = Plant(config_of("fedavg", rounds=30, training={"epochs": 1}), tmp_path)

    async def kill_and_restart() -> int:
        others = [asyncio.create_task(plant.live(i)) for i in range(1, 5)]
        victim = asyncio.create_task(plant.live(0))
        await reaches(plant, 0, 3)
        plant.kill(0, victim)
        await reaches(plant, 1, max(plant.rounds(1)) + 3)
        back = max(plant.rounds(1))
        await asyncio.gather(plant.live(0), *others)
        return back

    back = together(kill_and_restart())
    rounds = plant.rounds(0)
    assert rounds[:3] == [1, 2, 3]  # nothing that was committed is lost
    assert rounds == sorted(set(rounds))
    assert rounds[-1] == 30
    heard = [
        event["round"]
        for event in plant.events(1)[:-1]
        if event["round"] > back and "n0" in event["received"]
    ]
    assert heard[0] <= back + 3  # the round that was running when it came back, and two more
    assert len(heard) >= 30 - back - 3


def test_a_partition_lets_both_sides_go_on_and_heals_by_itself(tmp_path: Path) -> None:
    apart = False

    async def conditions(sender: str, receiver: str, method: Any) -> None:
        if apart and (sender in ("n0", "n1")) != (receiver in ("n0", "n1")):
            raise UnreachableError("the link is down.")

    plant = Plant(config_of("fedavg", rounds=40, training={"epochs": 1}), tmp_path, conditions)

    async def part_and_heal() -> tuple[int, int]:
        nonlocal apart
        tasks = [asyncio.create_task(plant.live(i)) for i in range(5)]
        await reaches(plant, 1, 2)
        apart = True
        await asyncio.sleep(2 * QUICK.silence)
        before = [max(plant.rounds(i)) for i in range(5)]
        await asyncio.gather(*(reaches(plant, i, before[i] + 2) for i in range(5)))
        apart = False
        healed = max(max(plant.rounds(i)) for i in range(5))
        await asyncio.gather(*tasks)
        return min(before), healed

    before, healed = together(part_and_heal())
    assert before >= 2
    apart_events = [event for event in plant.events(1) if "n2" in event.get("missing", ())]
    assert apart_events
    again = [
        event["round"]
        for event in plant.events(1)
        if "n2" in event.get("received", ()) and event["round"] > healed
    ]
    assert again
    assert again[0] <= healed + 4
    assert all(plant.events(i)[-1]["event"] == "final" for i in range(5))


def test_a_slow_neighbour_is_waited_for(tmp_path: Path) -> None:
    async def conditions(sender: str, receiver: str, method: Any) -> None:
        if "n2" in (sender, receiver):
            await asyncio.sleep(0.1)

    config = config_of("fedavg")
    plant = Plant(config, tmp_path, conditions)
    together(all_of(plant))
    assert [[event["hash"] for event in plant.events(i)] for i in range(5)] == [
        list(row) for row in zip(*simulated(plant.experiment), strict=True)
    ]


async def with_a_newcomer(plant: Plant, first: Callable[[], None] = lambda: None) -> None:
    """Node 5 joins five that have begun, as a neighbour of three of them; `first` happens before it asks for their models."""
    tasks = [asyncio.create_task(plant.live(i)) for i in range(5)]
    await reaches(plant, 1, 3)
    plant.links[5] = [0, 1, 2]
    for peer in list(plant.peers.values())[:3]:
        peer.talk.transport.manifest = dataclasses.replace(
            peer.talk.transport.manifest, members=plant.listed()
        )  # type: ignore[attr-defined]
    first()
    await asyncio.gather(plant.live(5), *tasks)


def test_a_newcomer_takes_its_neighbours_models_and_takes_part(tmp_path: Path) -> None:
    plant = Plant(config_of(rounds=25), tmp_path)
    together(with_a_newcomer(plant))
    rounds = plant.rounds(5)
    assert rounds[0] >= 3
    assert rounds[-1] == 25
    assert any("n5" in event.get("received", ()) for event in plant.events(0))
    assert plant.events(5)[-1]["event"] == "final"
    losses = [event["loss"] for event in plant.events(5)]
    assert losses[0] < 2.1  # ln 10 = 2.303 is a guess: it did not begin from nothing
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("method", ["fedavg", "fedem", "fedsoft", "ifca", "pfedme", "local"])
def test_a_newcomer_joins_whatever_its_method_shares(tmp_path: Path, method: str) -> None:
    """One model, all clusters, or nothing; clusters = 2 by default, whether or not the method has any."""
    plant = Plant(
        config_of(method, clusters=2, rounds=20, model={"name": "linear"}, training={"epochs": 1}),
        tmp_path,
    )
    together(with_a_newcomer(plant))
    assert plant.rounds(5)[0] >= 3
    assert plant.events(5)[-1]["event"] == "final"


def test_a_newcomer_does_without_a_neighbour_that_gives_it_too_few_clusters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plant = Plant(config_of(rounds=25), tmp_path)

    def give_one_cluster() -> None:
        shares = plant.peers[0].talk._shared
        plant.peers[0].talk._shared = lambda request: Offer((0,), shares(request).model_KP[:1])  # type: ignore[method-assign]

    with caplog.at_level("INFO"):
        together(with_a_newcomer(plant, give_one_cluster))
    assert "n0: it gives a newcomer the clusters [0]: expected [0, 1]." in caplog.text
    assert "joined with the models of 2 neighbours" in caplog.text
    assert plant.events(5)[-1]["event"] == "final"


def test_a_newcomer_with_one_neighbour_of_two_begins_in_its_round(tmp_path: Path) -> None:
    plant = Plant(
        config_of(
            "fedavg", clients=2, rounds=40, topology={"kind": "complete"}, training={"epochs": 1}
        ),
        tmp_path,
    )

    async def one_of_two() -> None:
        tasks = [asyncio.create_task(plant.live(i)) for i in range(2)]
        await reaches(plant, 0, 5)
        plant.kill(1, tasks[1])
        plant.links[2] = [0, 1]
        plant.peers[0].talk.transport.manifest = dataclasses.replace(
            plant.manifest(), members=plant.listed()
        )  # type: ignore[attr-defined]
        await asyncio.gather(plant.live(2), tasks[0])

    together(one_of_two())
    assert plant.rounds(2)[0] >= 5
    assert plant.rounds(2)[-1] == 40


def test_one_that_comes_back_to_its_only_living_neighbour_goes_to_its_round(tmp_path: Path) -> None:
    """Of a ring's two neighbours one is gone for good. It lags at first: that one might only be late, and the other lie."""
    plant = Plant(
        config_of("fedavg", clients=3, rounds=70, model={"name": "linear"}, training={"epochs": 1}),
        tmp_path,
    )
    brief = Timeouts(start=1.0, least=0.1, most=0.3, beat=0.05, silence=0.6, leave=0.2)

    def slow(i: int) -> Coroutine[Any, Any, None]:
        peer = plant.start(i, brief)
        start = peer.runner.start_round
        peer.runner.start_round = lambda round: (time.sleep(0.03), start(round))[1]  # type: ignore[method-assign, func-returns-value]
        return peer.live()

    async def behind() -> None:
        tasks = [asyncio.create_task(slow(i)) for i in range(2)]
        await reaches(plant, 1, 3)
        plant.kill(1, tasks[1])
        await reaches(plant, 0, 45)
        await asyncio.gather(slow(1), tasks[0])

    together(behind())
    last = [event for event in plant.events(1) if event["event"] == "round"][-1]
    assert max(later - round for round, later in pairwise(plant.rounds(1))) > 5
    assert (last["round"], last["received"]) == (70, ["n0"])


def test_a_newcomer_that_is_asked_to_leave_while_it_waits_leaves(tmp_path: Path) -> None:
    plant = Plant(config_of(), tmp_path)
    plant.links[5] = [0, 1]
    newcomer = plant.start(5)
    newcomer.leave()
    together(newcomer.live())
    assert plant.events(5) == []


def test_a_newcomer_that_nobody_answers_says_so(tmp_path: Path) -> None:
    plant = Plant(config_of(), tmp_path)
    plant.links[5] = [0, 1]
    with pytest.raises(NodeError, match="No neighbour gave its models"):
        together(plant.live(5))


def test_while_a_node_reads_its_rounds_nobody_gets_its_first_draws(tmp_path: Path) -> None:
    """It is asked from the moment that it listens, and would answer with a model that nobody has trained."""
    plant = Plant(config_of("fedavg"), tmp_path)
    runner = plant.start(0).runner
    with pytest.raises(ValueError, match="expected a non-empty list"):
        runner.load(tmp_path)  # there is no checkpoint: as far as it comes
    assert runner.state is None
    with pytest.raises(RejectedError, match="has not begun yet"):
        plant.peers[0].talk.handle_request(
            "n1", Request(0, JOINING, (0,), runner.plan.learner.size)
        )


def test_leaving_commits_the_round_and_the_next_start_goes_on(tmp_path: Path) -> None:
    plant = Plant(config_of("fedavg", rounds=12), tmp_path)

    async def leave_early() -> None:
        tasks = [asyncio.create_task(plant.live(i)) for i in range(5)]
        await reaches(plant, 0, 4)
        for peer in plant.peers.values():
            peer.leave()
        await asyncio.gather(*tasks)

    together(leave_early())
    done = [plant.rounds(i) for i in range(5)]
    for peer in plant.peers.values():
        peer.journal.close()
    assert all(4 <= max(rounds) < 12 for rounds in done)
    together(all_of(plant))
    assert all(plant.rounds(i)[: len(done[i])] == done[i] for i in range(5))
    assert all(plant.rounds(i)[-1] == 12 for i in range(5))


def test_a_folder_of_another_network_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "x", {"network": "a", "node": "n0", "agreement": "1"}).close()
    with pytest.raises(StorageError, match="belongs to another agreement"):
        Journal(tmp_path / "x", {"network": "a", "node": "n0", "agreement": "2"})


@pytest.mark.parametrize(
    ("kept", "factor"), [(10, 1.0), (None, 2.0)], ids=["fewer examples", "other examples"]
)
def test_data_that_changed_since_the_last_round_are_refused(
    kept: int | None, factor: float, tmp_path: Path
) -> None:
    plant = Plant(config_of(rounds=1), tmp_path)
    together(all_of(plant))
    plant.peers[0].journal.close()
    peer = plant.start(0)
    train = peer.runner.plan.train
    then, now = len(train.y[0]), len(train.y[0][:kept])
    changed = dataclasses.replace(train, x=[train.x[0][:kept] * factor], y=[train.y[0][:kept]])
    peer.runner.plan = dataclasses.replace(peer.runner.plan, train=changed)
    with pytest.raises(
        StorageError,
        match=rf"have changed since its last round \({then} examples to train on then, {now} now\)",
    ):
        together(peer.live())


def test_a_damaged_journal_stops_the_node_and_is_left_as_it_is(tmp_path: Path) -> None:
    plant = Plant(config_of("fedavg", rounds=1), tmp_path)
    together(all_of(plant))
    part = next((tmp_path / "n0" / "checkpoints").rglob("*.safetensors"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    plant.peers[0].journal.close()
    with pytest.raises(StorageError, match="missing or damaged"):
        together(plant.live(0))
    assert part.read_bytes() == whole[:-1] + bytes([whole[-1] ^ 1])
