"""A network of peers under random faults, in virtual time, checked after every step.

Messages are lost, doubled, delayed and so reordered; nodes crash, also in the middle of a commit,
restart and are rolled back; one node lies. The event loop jumps to its next timer, and training
runs at once, so that minutes pass in a moment.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chaos.faulty_network import MOMENTS, CrashError, FaultyNetwork, crash_next_commit
from chaos.insiders import Lie, OffersNothing, SaysAnything, SaysRound, SendsModels
from chaos.virtual_time import virtual_time
from chaos.witness import Witness
from fedspd.algorithms.fedavg import FedAvg
from fedspd.core.exchange import Exchange
from fedspd.core.graph import Graph
from fedspd.node.peer import answers
from fedspd.node.peer.inbox import ExchangeId, Inbox
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import FailureDetector, Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.peer.protocol import ExchangeProtocol
from fedspd.node.wire.codec import encode
from fedspd.node.wire.memory import MemoryTransport
from fedspd.node.wire.messages import Hello, Offer, Request
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.plan import Plan
from fedspd.storage.run_folder import RunFolder
from fedspd.testing import Subject
from fedspd.testing.peers import build_manifest, open_peer

N, ROUNDS = 5, 12
# all links but one: n0 and n3 are outsiders to each other
EDGES = [(i, j) for j in range(N) for i in range(j) if (i, j) != (0, 3)]
GRAPH = Graph.from_edges(N, EDGES, "median")
LINKS = {f"n{i}": {f"n{j}" for j in GRAPH.neighbours(i)} for i in range(N)}
TIMEOUTS = Timeouts(start=20, min_deadline=2, max_deadline=10, budget=10, down_after=5, linger=5)
LIAR = "n4"
TRAVEL_SECONDS = 0.5  # of a message: a round takes about a second, so that faults hit it
LONG_SECONDS = 30.0  # of virtual time, in which a node commits a round whatever happens
END_SECONDS = 900.0  # in which every honest node must finish
node = st.integers(0, N - 1)


LIES: list[Lie] = [
    Lie(), SaysRound(ROUNDS + 1), SaysRound(2**31 - 1), SendsModels(-5.0), SendsModels(1e30),
    OffersNothing(), SaysAnything(ROUNDS),
]  # fmt: skip


class Network(RuleBasedStateMachine):
    """Five peers on a complete graph, of which one may lie."""

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.clocks = Path(tempfile.mkdtemp(prefix="fedspd-states-")), ExitStack()
        self.loop = self.clocks.enter_context(virtual_time())
        self.plan: Plan = Subject(FedAvg, clusters=1).plan()
        self.manifest = build_manifest(self.plan, GRAPH, ROUNDS)
        self.peers: dict[int, Peer] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.witness = Witness(LINKS, {LIAR})

    @initialize(lie=st.sampled_from(LIES))
    def start(self, lie: Lie) -> None:
        self.network = FaultyNetwork(LIAR, deepcopy(lie), TRAVEL_SECONDS)
        for i in range(N):
            self.restart(i)

    # ---- faults

    @rule(a=node, b=node, fault=st.sampled_from(["lost", "doubled"]))
    def disturb(self, a: int, b: int, fault: str) -> None:
        getattr(self.network, fault).add((f"n{a}", f"n{b}"))
        self.witness.is_split |= fault == "lost"

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
            self._bury(i)
            self.pass_time(0.0)

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def cut_power(self, seconds: float) -> None:
        """All nodes are killed at once, and start again."""
        for i in range(N):
            self.crash(i)
        for i in range(N):
            self.restart(i)
        self.pass_time(seconds)

    @rule(i=node, at=st.sampled_from(MOMENTS))
    def crash_in_next_commit(self, i: int, at: str) -> None:
        if i in self.tasks:
            crash_next_commit(self.peers[i].journal.run_folder, at)

    def _bury(self, i: int) -> None:
        """Remove a process that has ended, or end it; no neighbour is told."""
        self.tasks.pop(i).cancel()
        self.network.disconnect(f"n{i}")
        self.peers[i].journal.close()

    @rule(i=node)
    def restart(self, i: int) -> None:
        if i not in self.tasks:
            self.peers[i] = open_peer(
                self.manifest, i, self.plan, GRAPH, ROUNDS, self.network, self.folder, TIMEOUTS
            )
            self.witness.watch(self.peers[i])
            self.tasks[i] = self.loop.create_task(self.peers[i].run())

    @rule(i=node)
    def roll_back(self, i: int) -> None:
        """The operator of a node that is down returns to the round before the last one."""
        kept = self.peers[i].journal.run_folder.kept_rounds()
        if i not in self.tasks and len(kept) > 1:
            self.peers[i].journal.roll_back(kept[-2])
            self.witness.forget(f"n{i}", kept[-2])

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, LONG_SECONDS]))
    def pass_time(self, seconds: float) -> None:
        before = {i: len(self.witness.committed[f"n{i}"]) for i in self.tasks}
        if len(self.tasks) < 3 and seconds >= 1.0:
            self.witness.is_split = True  # the liar may be the only one that is heard
        self.loop.run_until_complete(asyncio.sleep(seconds))
        for i, task in list(self.tasks.items()):
            if task.done() and isinstance(task.exception(), CrashError):
                self._bury(i)
            elif task.done():
                task.result()
        if seconds == LONG_SECONDS:
            self._check_progress(before)

    def _check_progress(self, before: dict[int, int]) -> None:
        """No fault stops the rounds of a node for long, once it has begun."""
        for i, count in before.items():
            is_stuck = len(self.witness.committed[f"n{i}"]) == count and not self._is_final(i)
            assert i not in self.tasks or not count or not is_stuck, f"n{i} is stuck"

    def _is_final(self, i: int) -> bool:
        return bool(self.peers[i].journal.last.get("event") == "final")

    @rule(i=node, name=st.sampled_from(["n0", "n3", "n9"]))
    def call_as_a_stranger(self, i: int, name: str) -> None:
        """A node of the same network that has no link is not heard."""
        transport = self.network.nodes.get(f"n{i}")
        if transport is not None and name not in LINKS[f"n{i}"] | {f"n{i}"}:
            hello = Hello(self.manifest.agreement, ROUNDS, "host:1")
            data = encode(transport.limits, name, hello)
            with pytest.raises(Exception, match=r"not in this network|have no link"):
                self.loop.run_until_complete(_send(name, transport, data))

    # ---- what must hold

    @invariant()
    def the_witness_saw_no_problem(self) -> None:
        for i, peer in self.peers.items():
            name, folder = f"n{i}", peer.journal.run_folder
            self.witness.check_journal(
                name, [(one["round"], one["hash"]) for one in folder.events()]
            )
            assert set(peer.detector.neighbours) <= LINKS[name]
        assert self.witness.problems == []

    @invariant()
    def all_parameters_are_finite(self) -> None:
        for peer in self.peers.values():
            if peer.runner.state is not None:
                assert all(t.isfinite().all() for t in peer.runner.tables().values() if t.dim() > 1)

    def play(self, *steps: tuple[str, Any]) -> None:
        """Take some steps, and check after each what must hold."""
        for name, values in steps:
            getattr(self, name)(*values)
            self.the_witness_saw_no_problem()

    def teardown(self) -> None:
        """The honest majority's rounds never stop: after all faults, every node finishes."""
        try:
            if not hasattr(self, "network"):
                return
            self.heal()
            self.cut_power(4.0)
            self.cut_power(1.0)  # with some rounds that are committed, and more to come
            end, honest = self.loop.time() + END_SECONDS, [i for i in range(N) if f"n{i}" != LIAR]
            while not all(map(self._is_final, honest)):
                assert self.loop.time() < end, [self.peers[i].protocol.current for i in honest]
                for i in range(N):
                    self.restart(i)
                self.pass_time(LONG_SECONDS)
                self.the_witness_saw_no_problem()
            self.cut_power(0.1)
            self.the_witness_saw_no_problem()
        finally:
            self._close()

    def _close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0.1))
        for i in self.tasks:
            self.peers[i].journal.close()
        self.clocks.close()
        shutil.rmtree(self.folder)


async def _send(name: str, transport: MemoryTransport, data: bytes) -> None:
    async for _ in transport.receive(name, "Hello", data):
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
        network.play(*steps)
    finally:
        network.teardown()


def test_example_a_liar_about_its_round_during_a_crash() -> None:
    play(SaysRound(ROUNDS + 1), ("pass_time", (0.1,)), ("crash", (0,)), ("pass_time", (7.0,)))


def begin(lie: Lie, rounds: int) -> Network:
    """Return a network whose first node has committed some rounds."""
    network = Network()
    network.start(lie)
    while len(network.witness.committed["n0"]) < rounds:
        network.pass_time(0.1)
    return network


def test_example_a_node_crashes_in_the_middle_and_returns() -> None:
    network = begin(Lie(), 4)
    try:
        network.crash(0)
        network.pass_time(1.0)
        network.restart(0)
    finally:
        network.teardown()


def test_example_a_liar_says_anything_while_nodes_crash_and_messages_are_doubled() -> None:
    play(
        SaysAnything(ROUNDS),
        ("disturb", (1, 2, "doubled")),
        ("delay", (0, 1, 1.5)),
        ("pass_time", (7.0,)),
        ("crash", (2,)),
        ("pass_time", (1.0,)),
        ("restart", (2,)),
        ("cut_power", (1.0,)),
        ("pass_time", (30.0,)),
    )


def test_example_a_link_is_lost_one_way_and_a_node_restarts() -> None:
    play(
        Lie(),
        ("disturb", (0, 1, "lost")),
        ("pass_time", (30.0,)),
        ("crash", (1,)),
        ("restart", (1,)),
        ("pass_time", (7.0,)),
    )


# ---- peers that are broken: the witness finds each


def restores_an_earlier_state(patch: pytest.MonkeyPatch) -> None:
    restore = Journal.restore

    def early(self: Journal, runner: BlockRunner, is_newcomer: bool) -> int:
        done = restore(self, runner, is_newcomer)
        if done > 1:
            runner.load(self.run_folder.folder / f"checkpoints/round-{done - 1:06d}")
        return done

    patch.setattr(Journal, "restore", early)


def restores_an_earlier_round(patch: pytest.MonkeyPatch) -> None:
    latest = RunFolder.latest

    def early(self: RunFolder) -> Any:
        for newest in self.kept_rounds()[1:][-1:]:
            shutil.rmtree(self.folder / f"checkpoints/round-{newest:06d}")
        return latest(self)

    patch.setattr(RunFolder, "latest", early)


def loses_committed_rounds(patch: pytest.MonkeyPatch) -> None:
    checkpoint = RunFolder.checkpoint

    @contextmanager
    def lose(self: RunFolder, round: int, *about: Any) -> Iterator[Path]:
        with checkpoint(self, round, *about) as path:
            yield path
        if round > 2:
            shutil.rmtree(self.folder / f"checkpoints/round-{round:06d}")

    patch.setattr(RunFolder, "checkpoint", lose)


def goes_on_before_it_commits(patch: pytest.MonkeyPatch) -> None:
    commit = Peer._commit

    async def forget(self: Peer, round: int, *about: Any) -> None:
        if round % 4:
            await commit(self, round, *about)

    patch.setattr(Peer, "_commit", forget)


def repeats_a_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Peer, "_skip_rounds", lambda self, round: round - (round == 6))


def hears_outsiders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryTransport, "receive", MemoryTransport.serve)


def sends_models_of_the_round_before(patch: pytest.MonkeyPatch) -> None:
    answer = ExchangeProtocol.handle_request

    def answer_late(self: ExchangeProtocol, sender: str, request: Request) -> Offer:
        before = replace(request, round=max(1, request.round - 1))
        return answer(self, sender, before)

    patch.setattr(ExchangeProtocol, "handle_request", answer_late)


def uses_old_announcements(patch: pytest.MonkeyPatch) -> None:
    get = Inbox.get

    def get_any(self: Inbox, sender: str, exchange_id: ExchangeId) -> Any:
        return get(self, sender, exchange_id) or get(self, sender, self.latest(sender))

    patch.setattr(Inbox, "get", get_any)
    patch.setattr(Inbox, "discard", lambda self, before: None)


def averages_what_nobody_sent(patch: pytest.MonkeyPatch) -> None:
    stack = answers._stack_offers

    def mix(*about: Any) -> Exchange:
        exchange = stack(*about)
        return replace(exchange, model_CKP=exchange.model_CKP + exchange.model_CKP.flip(0))

    patch.setattr(answers, "_stack_offers", mix)


def believes_one_neighbour(patch: pytest.MonkeyPatch) -> None:
    def latest(self: FailureDetector) -> int:
        return max(each.round for each in self.neighbours.values())

    patch.setattr(FailureDetector, "confirmed_round", latest)


def waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FailureDetector, "patience", lambda self, name: 1e9)
    patch.setattr(FailureDetector, "is_awaited", lambda self, name: True)
    wait = ExchangeProtocol.wait_until
    patch.setattr(
        ExchangeProtocol,
        "wait_until",
        lambda self, condition, seconds, *about: wait(self, condition, 1e9, *about),
    )


@pytest.mark.parametrize(
    ("break_peers", "finding"),
    [
        (restores_an_earlier_state, "restores"),
        (restores_an_earlier_round, "restores"),
        (loses_committed_rounds, "restores"),
        (goes_on_before_it_commits, "never committed 4"),
        (repeats_a_round, "repeats round 5"),
        (hears_outsiders, "DID NOT RAISE"),
        (sends_models_of_the_round_before, "never offered"),
        (uses_old_announcements, "averages round"),
        (averages_what_nobody_sent, "what nobody sent"),
        (believes_one_neighbour, "skips to round"),
        (waits_for_ever, "is stuck"),
    ],
)
def test_witness_finds_a_peer_that(
    break_peers: Callable[[pytest.MonkeyPatch], None],
    finding: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_peers(monkeypatch)
    network = begin(SaysRound(ROUNDS + 1), 3)
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception), match=finding):
            network.play(
                ("call_as_a_stranger", (0, "n3")),
                ("cut_power", (1.0,)),
                ("crash", (1,)),
                ("pass_time", (LONG_SECONDS,)),
                ("pass_time", (LONG_SECONDS,)),
            )
    finally:
        network._close()
