"""A network of peers under random faults, in virtual time, checked after every step.

Messages are lost, doubled, delayed and so reordered; nodes crash and restart; one node lies. The
event loop jumps to its next timer, and training runs at once, so that minutes pass in a moment.
"""

import asyncio
import hashlib
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from chaos.insiders import InsiderNetwork, InsiderTransport, Lie
from chaos.virtual_time import InstantLoop
from fedspd.algorithms.fedavg import FedAvg
from fedspd.core.errors import RejectedError, UnreachableError
from fedspd.core.graph import Graph
from fedspd.node.identity.manifest import Manifest
from fedspd.node.peer import liveness
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.wire.base import FrameStream, RpcMethod
from fedspd.node.wire.memory import MemoryTransport
from fedspd.node.wire.messages import Announcement, Hello, Offer, Request
from fedspd.runtime.plan import Plan
from fedspd.testing import Subject
from fedspd.testing.peers import build_manifest, open_peer

N, ROUNDS = 5, 12
GRAPH = Graph.complete(N, "median")
TIMEOUTS = Timeouts(start=20, min_deadline=2, max_deadline=10, budget=10, down_after=5, linger=5)
LIAR = "n4"
TRAVEL_SECONDS = 0.2  # of a message: a round takes about a second, so that faults hit it
END_SECONDS = 900.0  # of virtual time, in which every honest node must finish
node = st.integers(0, N - 1)


class SaysRound(Lie):
    """Says that it is in another round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def hello(self, truth: Hello) -> Hello:
        return Hello(truth.agreement, self.round, truth.address)


class SendsModel(Lie):
    """Sends a false model."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def offer(self, network: InsiderNetwork, to: str, request: Request, truth: Offer) -> Offer:
        return Offer(truth.clusters, self.factor * truth.model_KP)


class OffersNothing(Lie):
    """Announces models and never sends them."""

    def offer(self, network: InsiderNetwork, to: str, request: Request, truth: Offer) -> Offer:
        raise RejectedError("not now.")


LIES: list[Lie] = [
    Lie(), SaysRound(ROUNDS + 1), SaysRound(2**31 - 1), SendsModel(-5.0), SendsModel(1e30),
    OffersNothing(),
]  # fmt: skip


def digest(model_KP: Tensor) -> str:
    return hashlib.sha256(model_KP.contiguous().numpy().tobytes()).hexdigest()


class FaultyNetwork(InsiderNetwork):
    """A network that loses, doubles and delays messages, by link."""

    def __init__(self, lie: Lie) -> None:
        super().__init__({LIAR: lie}, self.travel)
        self.lost: set[tuple[str, str]] = set()
        self.doubled: set[tuple[str, str]] = set()
        self.delay_seconds: dict[tuple[str, str], float] = {}

    async def travel(self, sender: str, receiver: str, method: RpcMethod) -> None:
        if (sender, receiver) in self.lost:
            raise UnreachableError("lost.")
        await asyncio.sleep(self.delay_seconds.get((sender, receiver), TRAVEL_SECONDS))

    def transport(self, manifest: Manifest, name: str) -> MemoryTransport:
        if name == LIAR:
            return DoublingInsider(self, manifest, name, self.lies[name])
        return DoublingTransport(self, manifest, name)


class Doubling(MemoryTransport):
    """A transport whose messages may arrive twice."""

    async def receive(self, sender: str, method: RpcMethod, data: bytes) -> FrameStream:
        assert isinstance(self.network, FaultyNetwork)
        if (sender, self.name) in self.network.doubled:
            try:
                async for _ in super().receive(sender, method, data):
                    pass
            except (RejectedError, UnreachableError):
                pass
        async for frame in super().receive(sender, method, data):
            yield frame


class DoublingTransport(Doubling): ...


class DoublingInsider(Doubling, InsiderTransport): ...


class Network(RuleBasedStateMachine):
    """Five peers on a complete graph, of which one may lie."""

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.loop = Path(tempfile.mkdtemp(prefix="fedspd-states-")), InstantLoop()
        self.real_time, liveness.time = liveness.time, SimpleNamespace(monotonic=self.loop.time)
        self.plan: Plan = Subject(FedAvg, clusters=1).plan()
        self.manifest = build_manifest(self.plan, GRAPH, ROUNDS)
        self.peers: dict[int, Peer] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.committed: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self.offered: dict[tuple[str, int, int], set[str]] = defaultdict(set)
        self.problems: list[str] = []

    @initialize(lie=st.sampled_from(LIES))
    def start(self, lie: Lie) -> None:
        self.network = FaultyNetwork(lie)
        for i in range(N):
            self.restart(i)

    # ---- faults

    @rule(a=node, b=node, fault=st.sampled_from(["lost", "doubled"]))
    def disturb(self, a: int, b: int, fault: str) -> None:
        getattr(self.network, fault).add((f"n{a}", f"n{b}"))

    @rule(a=node, b=node, seconds=st.sampled_from([0.001, 0.3, 1.5, 4.0]))
    def delay(self, a: int, b: int, seconds: float) -> None:
        self.network.delay_seconds[f"n{a}", f"n{b}"] = seconds

    @rule()
    def heal(self) -> None:
        self.network.lost.clear()
        self.network.doubled.clear()
        self.network.delay_seconds.clear()

    @rule(i=node)
    def crash(self, i: int) -> None:
        if i in self.tasks:
            self.tasks.pop(i).cancel()
            self.network.disconnect(f"n{i}")
            self.peers[i].journal.close()
            self.pass_time(0.0)

    @rule(i=node)
    def restart(self, i: int) -> None:
        if i not in self.tasks:
            self.peers[i] = open_peer(
                self.manifest, i, self.plan, GRAPH, ROUNDS, self.network, self.folder, TIMEOUTS
            )
            self._watch(self.peers[i])
            self.tasks[i] = self.loop.create_task(self.peers[i].run())

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @precondition(lambda self: self.tasks)
    @rule(i=node)
    def call_as_a_stranger(self, i: int) -> None:
        """A node of the same network that has no link is not heard."""
        peer = self.peers[i]
        if i in self.tasks and f"n{i}" in self.network.nodes:
            transport = self.network.nodes[f"n{i}"]
            with pytest.raises(Exception, match="not in this network"):
                self.loop.run_until_complete(_send_as("n9", transport))
            assert "n9" not in peer.detector.neighbours

    # ---- what must hold

    def _watch(self, peer: Peer) -> None:
        """Note all that a peer offers, and compare all that it averages with it."""
        name, protocol = peer.context.name, peer.protocol
        advance = peer._build_neighbourhood

        def check(exchange: Any, answers: dict[str, Any]) -> Any:
            for sender, answer in answers.items():
                said: Announcement = answer.announcement
                if (said.round, said.exchange) != tuple(protocol.current):
                    self.problems.append(f"{name} averages round {said.round} of {sender}")
                known = self.offered[sender, said.round, said.exchange]
                if len(answer.offer.clusters) and digest(answer.offer.model_KP) not in known:
                    self.problems.append(f"{name} averages what {sender} never offered")
            return advance(exchange, answers)

        peer._build_neighbourhood = check  # type: ignore[method-assign]
        handler, offered = protocol, self.offered
        answer_request = type(protocol).handle_request
        lie = self.network.lies.get(name, Lie())

        def note(sender: str, request: Request) -> Offer:
            truth = answer_request(handler, sender, request)
            key = name, request.round, request.exchange
            offered[key].add(digest(truth.model_KP))
            if not isinstance(lie, OffersNothing):
                said = lie.offer(self.network, sender, request, truth)
                offered[key].add(digest(said.model_KP))
            return truth

        protocol.handle_request = note  # type: ignore[method-assign]
        self._watch_restore(peer)

    def _watch_restore(self, peer: Peer) -> None:
        """Compare what a peer restores with the last round that is on its disk."""
        journal, restore = peer.journal, peer.journal.restore

        def check(runner: Any, is_newcomer: bool) -> int:
            folder = journal.run_folder.folder
            rounds = [int(path.name[6:]) for path in folder.glob("checkpoints/round-*[0-9]")]
            hashes = {one["round"]: one["hash"] for one in journal.run_folder.events()}
            done = restore(runner, is_newcomer)
            if done != max(rounds, default=0):
                self.problems.append(f"{peer.context.name} restores {done} of {sorted(rounds)}")
            elif done and runner.digests()[0] != hashes[done]:
                self.problems.append(f"{peer.context.name} restores another state after {done}")
            return done

        journal.restore = check  # type: ignore[method-assign]

    @invariant()
    def nothing_committed_is_lost_or_changed(self) -> None:
        for i, peer in self.peers.items():
            events = peer.journal.run_folder.events()
            found = [(one["round"], one["hash"]) for one in events]
            done = len(list(peer.journal.run_folder.folder.glob("checkpoints/round-*[0-9]")))
            known = self.committed[i]
            if i in self.tasks:
                # an event without its checkpoint is not committed yet, and may be written again
                assert found[: len(known)] == known
                self.committed[i] = found if done else known

    @invariant()
    def rounds_never_go_back(self) -> None:
        for events in self.committed.values():
            rounds = [round for round, _ in events]
            assert rounds == sorted(set(rounds))

    @invariant()
    def means_and_restored_states_are_right(self) -> None:
        """A mean has what was offered for its round alone; a restore is of the last round."""
        assert self.problems == []

    @invariant()
    def all_parameters_are_finite(self) -> None:
        for peer in self.peers.values():
            if peer.runner.state is not None:
                assert all(t.isfinite().all() for t in peer.runner.tables().values() if t.dim() > 1)

    def teardown(self) -> None:
        """The honest majority's rounds never stop: after all faults, every node finishes."""
        try:
            if not hasattr(self, "network"):
                return
            self.heal()
            for i in range(N):
                self.restart(i)
            honest = [self.tasks[i] for i in range(N) if f"n{i}" != LIAR]
            waiting = asyncio.wait(honest, timeout=END_SECONDS)
            done, pending = self.loop.run_until_complete(waiting)
            assert not pending, [self.peers[i].protocol.current for i in range(N)]
            for task in done:
                task.result()
            for i in range(N):
                if f"n{i}" != LIAR:
                    assert self.peers[i].journal.last["event"] == "final"
            self.nothing_committed_is_lost_or_changed()
            self.rounds_never_go_back()
            self.means_and_restored_states_are_right()
        finally:
            self._close()

    def _close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        for i in self.tasks:
            self.peers[i].journal.close()
        liveness.time = self.real_time
        self.loop.close()
        shutil.rmtree(self.folder)


async def _send_as(name: str, transport: MemoryTransport) -> None:
    async for _ in transport.receive(name, "Hello", b""):
        pass


SHORT = settings(
    max_examples=4, stateful_step_count=12, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
LONG = settings(SHORT, max_examples=60, stateful_step_count=30, derandomize=False)


class TestShort(Network.TestCase):
    settings = SHORT


@pytest.mark.long
@pytest.mark.timeout(1800)
class TestLong(Network.TestCase):
    settings = LONG


def play(lie: Lie, *steps: tuple[str, Any]) -> None:
    """Play a known sequence of faults."""
    network = Network()
    try:
        network.start(lie)
        for name, values in steps:
            getattr(network, name)(*values)
            network.nothing_committed_is_lost_or_changed()
            network.rounds_never_go_back()
            network.means_and_restored_states_are_right()
    finally:
        network.teardown()


def test_example_a_liar_about_its_round_during_a_crash() -> None:
    play(SaysRound(ROUNDS + 1), ("pass_time", (0.1,)), ("crash", (0,)), ("pass_time", (7.0,)))


def test_example_a_node_crashes_in_the_middle_and_returns() -> None:
    network = Network()
    try:
        network.start(Lie())
        while len(network.committed[0]) < 4:
            network.pass_time(0.1)
            network.nothing_committed_is_lost_or_changed()
        assert len(network.committed[0]) < ROUNDS
        network.crash(0)
        network.pass_time(1.0)
        network.restart(0)
    finally:
        network.teardown()


@pytest.mark.parametrize("lost", ["state", "number"])
def test_restore_one_round_too_early_is_noticed(lost: str, monkeypatch: Any) -> None:
    """The machine sees a journal that restores an earlier state, or says that it did."""
    restore = Journal.restore

    def restore_early(self: Journal, runner: Any, is_newcomer: bool) -> int:
        done = restore(self, runner, is_newcomer)
        kept = self.run_folder.kept_rounds()
        if len(kept) < 2:
            return done
        if lost == "state":
            runner.load(self.run_folder.folder / f"checkpoints/round-{kept[-2]:06d}")
            return done
        return done - 1

    monkeypatch.setattr(Journal, "restore", restore_early)
    network = Network()
    network.start(Lie())
    while len(network.committed[0]) < 4:
        network.pass_time(0.1)
        network.nothing_committed_is_lost_or_changed()
    network.crash(0)
    network.restart(0)
    network.pass_time(1.0)
    with pytest.raises(AssertionError, match="n0 restores"):
        network.means_and_restored_states_are_right()
    network._close()


def test_example_a_link_is_lost_one_way_and_a_node_restarts() -> None:
    play(
        Lie(),
        ("disturb", (0, 1, "lost")),
        ("pass_time", (30.0,)),
        ("crash", (1,)),
        ("restart", (1,)),
        ("pass_time", (7.0,)),
    )
