"""FedSPD-Split on peers: its many exchanges, nodes that are away, and a network that is cut.

The peers use the in-memory transport, which encodes and checks every message as on the wire.
"""

import asyncio
import dataclasses
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from chaos.insiders import InsiderNetwork, Lie
from chaos.virtual_time import run_instantly
from fedspd.algorithms import populations
from fedspd.algorithms.fedspd_split import FedSPDSplit
from fedspd.algorithms.split_state import State
from fedspd.core.block import Block
from fedspd.core.errors import UnreachableError
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.wire.memory import MemoryNetwork
from fedspd.node.wire.messages import Offer, Request
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.plan import Plan
from fedspd.testing.peers import build_manifest, open_peers, run_peers, run_together
from fedspd.testing.strict_engine import StrictEngine
from fedspd.testing.subject import run, select_clients

N, EXAMPLES = 6, 40
QUICK = Timeouts(
    start=20, min_deadline=0.5, max_deadline=20, heartbeat_interval=0.1, down_after=1.0, linger=0.3
)
RING = [(i, (i + k) % N) for i in range(N) for k in (1, 2)]


def build_plan(rounds: int, **options: Any) -> Plan:
    """Return a network of two populations that label differently, by turns."""
    rng = np.random.default_rng(0)
    other, teacher = np.array([2, 3, 0, 1]), rng.normal(size=(10, 4))
    x = [torch.from_numpy(rng.normal(size=(EXAMPLES, 10)).astype(np.float32)) for _ in range(N)]
    label = [(own.double().numpy() @ teacher).argmax(1) for own in x]
    y = [torch.from_numpy(other[own] if i % 2 else own) for i, own in enumerate(label)]
    data = Block(range(N), N, x, y, EXAMPLES, rounds=rounds, diameter=2)
    learner = Learner(build_model, TrainingOptions(lr=0.2, batch=10, epochs=2, decay=1))
    truth = [np.full(EXAMPLES, i % 2) for i in range(N)]
    return Plan(FedSPDSplit(**options), learner, data, data, truth, 2, Key(0))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("clusters", "rule"),
    [(0, "uniform"), pytest.param(2, "median", marks=pytest.mark.long)],
)
def test_peers_that_split_equal_the_simulator_to_the_bit(
    clusters: int, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populations, "EXCHANGES", 4)  # a coarse network mean is as equal
    plan, graph = build_plan(5, clusters=clusters), Graph.from_edges(N, RING, rule)
    assert run_peers(plan, graph, 5) == run(StrictEngine(plan), graph, last=5)


class SendsHugeHead(Lie):
    """Sends a huge second head in round 5, whose first exchange is that of the body."""

    def offer(self, network: InsiderNetwork, to: str, request: Request, truth: Offer) -> Offer:
        if (request.round, request.exchange) != (5, 1):
            return truth
        return Offer(truth.clusters, truth.model_KP * torch.tensor([[1.0], [1e4]]))


def test_huge_head_of_one_cluster_costs_only_its_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a mean could do about it was to give up the answers of all neighbours."""
    monkeypatch.setattr(populations, "EXCHANGES", 4)
    plan, graph = build_plan(5, clusters=2), Graph.from_edges(N, RING)
    network = InsiderNetwork({"n5": SendsHugeHead()})
    with open_peers(plan, graph, 5, network, tmp_path) as peers:
        run_instantly(run_together(*(peer.run() for peer in peers)))
        for i, peer in enumerate(peers[:5]):
            is_neighbour = (i, 5) in RING or (5, i) in RING
            assert dict(peer.protocol.refused) == ({"n5": 1} if is_neighbour else {})
            assert peer.refused_means == 0


async def travel(sender: str, receiver: str, method: Any) -> None:
    """Let a message take some time, so that an exchange has a middle."""
    await asyncio.sleep(0.02)


class Plant:
    """The peers of a plan on a ring with chords, some of which may fail."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder, self.graph = plan, folder, Graph.from_edges(N, RING)
        self.manifest = build_manifest(plan, self.graph, plan.train.rounds)
        self.network, self.peers = MemoryNetwork(travel), dict[int, Peer]()

    def run(self, i: int) -> Coroutine[Any, Any, None]:
        """Run peer i, which begins or continues from its journal."""
        manifest, member = self.manifest, self.manifest.members[i]
        context = NodeContext(
            name=member.name,
            client=i,
            address=member.address,
            neighbours={name: manifest.member(name).client for name in member.neighbours},
            agreement=manifest.agreement,
            rounds=self.plan.train.rounds,
            rule="uniform",
            evaluate_every=1,
        )
        owner = {"network": manifest.network, "node": member.name}
        journal = Journal(self.folder / member.name, {**owner, "agreement": manifest.agreement})
        runner = BlockRunner(select_clients(self.plan, [i]))
        transport = self.network.transport(manifest, member.name)
        self.peers[i] = Peer(context, runner, journal, transport, QUICK)
        return self.peers[i].run()

    def kill(self, i: int, task: "asyncio.Task[None]") -> None:
        """End a peer like kill -9."""
        task.cancel()
        self.network.disconnect(f"n{i}")
        self.peers[i].journal.close()

    async def wait_for(self, i: int, round: int, exchange: int = 0) -> None:
        """Wait until peer i is in an exchange, or past it."""
        while self.peers[i].protocol.current < (round, exchange):
            await asyncio.sleep(0.005)

    def state(self) -> State:
        """Return the states of all peers as one."""
        states = [self.peers[i].runner.state for i in range(N)]
        names = [field.name for field in dataclasses.fields(State)]
        return State(**{name: torch.cat([getattr(s, name) for s in states]) for name in names})


def assert_one_labelling(state: State) -> None:
    """All have one labelling of two clusters, and each population has a cluster of its own."""
    assert len(set(state.labelling_C.tolist())) == 1
    assert state.clusters_C.tolist() == [2] * N
    first = int(state.mixture_CS[0].argmax())
    assert state.mixture_CS.argmax(1).tolist() == [first if i % 2 == 0 else 1 - first
                                                   for i in range(N)]  # fmt: skip


@pytest.mark.parametrize(
    ("killed_at", "back_at"),
    [
        pytest.param((1, 30), (3, 0), id="killed in the search"),
        pytest.param((3, 6), (5, 0), id="killed in the split", marks=pytest.mark.long),
        pytest.param((2, 0), (3, 6), id="back in the split", marks=pytest.mark.long),
    ],
)
def test_node_away_during_search_or_split_joins_the_others(
    killed_at: tuple[int, int], back_at: tuple[int, int], tmp_path: Path
) -> None:
    plant = Plant(build_plan(10, clusters=2, final_epochs=0), tmp_path)

    async def kill_and_restart() -> None:
        others = [asyncio.create_task(plant.run(i)) for i in range(N) if i != 3]
        victim = asyncio.create_task(plant.run(3))
        await plant.wait_for(3, *killed_at)
        plant.kill(3, victim)
        await plant.wait_for(4, *back_at)
        await asyncio.gather(plant.run(3), *others)

    run_instantly(kill_and_restart())
    assert_one_labelling(plant.state())


def test_halves_that_split_apart_and_heal_end_with_one_labelling(tmp_path: Path) -> None:
    plant = Plant(build_plan(10, clusters=2, final_epochs=0), tmp_path)

    async def cut(sender: str, receiver: str, method: Any) -> None:
        if (sender < "n3") != (receiver < "n3"):
            raise UnreachableError("the link is down.")
        await travel(sender, receiver, method)

    async def cut_and_heal() -> None:
        ideal, plant.network.conditions = plant.network.conditions, cut
        tasks = [asyncio.create_task(plant.run(i)) for i in range(N)]
        await asyncio.gather(*(plant.wait_for(i, 5) for i in range(N)))
        apart.update(plant.peers[i].runner.state.labelling_C.item() for i in range(N))
        plant.network.conditions = ideal
        await asyncio.gather(*tasks)

    apart: set[int] = set()
    run_instantly(cut_and_heal())
    state = plant.state()
    assert len(apart) == 2
    assert_one_labelling(state)
    assert int(state.labelling_C[0]) == max(apart)
