"""Complete networks of peers in one process, for virtual time.

The peers use the in-memory transport, which encodes and checks every message as on the wire.
"""

import asyncio
import dataclasses
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from chaos.virtual_time import pass_time
from fedspd.config import ExperimentConfig, as_dict, validate
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
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json

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
ROUND_SECONDS = 0.03  # that a peer computes


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


class SlowRunner(BlockRunner):
    """The runner of a peer whose rounds take some time, so that they have a middle."""

    def start_round(self, *about: Any) -> Any:
        pass_time(ROUND_SECONDS)
        return super().start_round(*about)


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
        plan = self.experiment.plan.select_clients(shard)
        block = dataclasses.replace(plan.train, clients=[i], network_size=max(clients, i + 1))
        runner = SlowRunner(dataclasses.replace(plan, train=block))
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


async def run_all(plant: Plant, timeouts: Timeouts = PATIENT) -> None:
    await asyncio.gather(*(plant.run(i, timeouts) for i in range(plant.config.clients)))


async def wait_for_round(plant: Plant, i: int, round: int) -> None:
    async with asyncio.timeout(600):
        while not any(event["round"] >= round for event in plant.events(i)):
            await asyncio.sleep(0.01)
