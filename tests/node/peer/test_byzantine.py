"""A Byzantine neighbour loses its own influence and costs the others little time.

The peers use the in-memory transport, which encodes and checks every message as on the wire.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chaos.virtual_time import run_instantly
from fedspd.config import ExperimentConfig, as_dict, validate
from fedspd.core.errors import RejectedError, TransportError
from fedspd.core.ledger import NO_CLUSTER
from fedspd.experiment.build import build_experiment
from fedspd.node.identity.manifest import Manifest, Member
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import MAX_MISSED_DEADLINES, MIN_REFUND_SECONDS, Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.wire.memory import MemoryNetwork
from fedspd.node.wire.messages import Announcement, Hello, Offer, Request
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json

ROUNDS = 12
COMMON = {
    "clients": 3,
    "rounds": ROUNDS,
    "data": {"name": "digits", "examples": 30},
    "topology": {"kind": "complete"},
    "model": {"name": "linear"},
}
TIMEOUTS = Timeouts(
    start=60,
    min_deadline=1,
    max_deadline=3,
    heartbeat_interval=0.1,
    down_after=30,
    linger=0.2,
)
# a node that waits for the Byzantine one in every round takes more than thirty
MAX_SECONDS = (MAX_MISSED_DEADLINES + 2) * TIMEOUTS.max_deadline
MEMBERS = tuple(
    Member(f"n{i}", i, f"host:{7000 + i}", tuple(f"n{j}" for j in range(3) if j != i), i + 1)
    for i in range(3)
)


def build_manifest(config: ExperimentConfig) -> Manifest:
    experiment = build_experiment(config)
    federation, size = experiment.federation, experiment.plan.learner.size
    about = as_dict(config), federation.shape, federation.classes
    return Manifest("0" * 32, False, *about, size, config.clusters, size, 1, "float32", MEMBERS)


FEDAVG = build_manifest(validate({**COMMON, "method": "fedavg", "clusters": 1}))
FEDSPD = build_manifest(
    validate({**COMMON, "method": "fedspd", "clusters": 2, "fedspd": {"align_every": 2}})
)
HONEST = Announcement(1, 0, (0,), (30.0,), (0,), 0, 2)


class Byzantine:
    """Node 2, which greets like the others and otherwise does what the test wants."""

    manifest = FEDAVG

    def __init__(
        self, announces: Callable[[int], Announcement], offers: Callable[[Request], Offer]
    ) -> None:
        self.announces, self.offers, self.round = announces, offers, 1

    def handle_hello(self, sender: str, hello: Hello) -> Hello:
        return Hello(self.manifest.agreement, self.round, "host:7002")

    def handle_announcement(self, sender: str, announcement: Announcement) -> None:
        self.round = max(self.round, announcement.round)

    def handle_request(self, sender: str, request: Request) -> Offer:
        return self.offers(request)

    def handle_mute(self, neighbour: str) -> None: ...

    async def run(self, network: MemoryNetwork) -> None:
        transport = network.transport(self.manifest, "n2")
        await transport.start(self)
        while True:
            for name in ("n0", "n1"):
                try:
                    await transport.hello(name, self.handle_hello(name, Hello("", 0, "")), 1)
                    await transport.announce(name, self.announces(self.round), 1)
                except TransportError:
                    pass
            await asyncio.sleep(0.02)


def build_peer(i: int, network: MemoryNetwork, manifest: Manifest, folder: Path) -> Peer:
    neighbours = {f"n{j}": j for j in range(3) if j != i}
    name, address = f"n{i}", f"host:{7000 + i}"
    context = NodeContext(
        name, i, address, neighbours, manifest.agreement, ROUNDS, "uniform", evaluate_every=1
    )
    owner = {"network": manifest.network, "node": name, "agreement": manifest.agreement}
    journal = Journal(folder / name, owner)
    plan = build_experiment(validate(manifest.config)).plan
    runner = BlockRunner(plan.select_clients(range(i, i + 1)))
    transport = network.transport(manifest, name)
    return Peer(context, runner, journal, transport, TIMEOUTS)


def run_with(byzantine: Byzantine, folder: Path) -> tuple[list[Peer], float]:
    """Run two honest peers beside a Byzantine one; return them, and the virtual seconds."""
    network = MemoryNetwork()
    honest = [build_peer(i, network, byzantine.manifest, folder) for i in range(2)]

    async def run() -> float:
        attack = asyncio.create_task(byzantine.run(network))
        await asyncio.gather(*(peer.run() for peer in honest))
        seconds = asyncio.get_running_loop().time()
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
        return seconds

    return honest, run_instantly(run())


def round_events(peer: Peer) -> list[Json]:
    return [event for event in peer.journal.run_folder.events() if event["event"] == "round"]


def refuse(request: Request) -> Offer:
    raise RejectedError("not now.")


def offer_constant(value: float) -> Callable[[Request], Offer]:
    return lambda request: Offer((0,), torch.full((1, request.size), value))


def announce(round: int, **changes: object) -> Announcement:
    return Announcement(**{**HONEST.__dict__, "round": round, **changes})


ATTACKS = {
    "not a number": Byzantine(announce, offer_constant(float("nan"))),
    "announces without offering": Byzantine(announce, refuse),
    "wrong shape": Byzantine(
        announce, lambda request: Offer((0,), torch.zeros(1, request.size - 1))
    ),
    "too many models": Byzantine(
        lambda t: announce(t, clusters=(0, -1), weights=(1.0, 1.0)), offer_constant(0.0)
    ),
    "always the last round": Byzantine(lambda t: announce(ROUNDS), offer_constant(0.0)),
    "no such round": Byzantine(lambda t: announce(ROUNDS + 1), offer_constant(0.0)),
}


@pytest.mark.parametrize("byzantine", ATTACKS.values(), ids=ATTACKS)
def test_honest_peers_continue_beside_a_byzantine_one(byzantine: Byzantine, tmp_path: Path) -> None:
    honest, seconds = run_with(byzantine, tmp_path)
    assert seconds <= MAX_SECONDS
    for peer, other in zip(honest, reversed(honest), strict=True):
        events = round_events(peer)
        assert [event["round"] for event in events] == list(range(1, ROUNDS + 1))
        assert all(other.context.name in event["received"] for event in events)
        # at most the last round, if it always announces that one
        assert sum("n2" in event["received"] for event in events) <= 1


class Deaf(Byzantine):
    """A node that takes part in every round and refuses all announcements."""

    def handle_announcement(self, sender: str, announcement: Announcement) -> None:
        super().handle_announcement(sender, announcement)
        raise RejectedError("not listening.")


def test_honest_peers_soon_stop_waiting_for_one_that_refuses_announcements(
    tmp_path: Path,
) -> None:
    honest, seconds = run_with(Deaf(announce, offer_constant(0.0)), tmp_path)
    assert seconds <= MAX_SECONDS
    for peer in honest:
        assert len(round_events(peer)) == ROUNDS


class Surprising(Byzantine):
    """A node that seems to be done when a round begins, then takes part, and answers late."""

    LATE_SECONDS = 2.5  # within every deadline

    def __init__(self) -> None:
        super().__init__(announce, offer_constant(0.0))
        self.says = dict.fromkeys(("n0", "n1"), ROUNDS + 1)
        self.answers: dict[tuple[str, int], asyncio.Task[None]] = {}

    def handle_hello(self, sender: str, hello: Hello) -> Hello:
        return Hello(self.manifest.agreement, self.says[sender], "host:7002")

    def handle_announcement(self, sender: str, announcement: Announcement) -> None:
        key = sender, announcement.round
        if key not in self.answers:
            self.answers[key] = asyncio.create_task(self.answer(*key))

    async def answer(self, name: str, round: int) -> None:
        await self.greet(name, round)
        await asyncio.sleep(self.LATE_SECONDS)
        await self.greet(name, ROUNDS + 1)
        with suppress(TransportError):
            await self.transport.announce(name, announce(round), 1)

    async def greet(self, name: str, round: int) -> None:
        self.says[name] = round
        with suppress(TransportError):
            await self.transport.hello(name, self.handle_hello(name, Hello("", 0, "")), 1)

    async def run(self, network: MemoryNetwork) -> None:
        self.transport = network.transport(self.manifest, "n2")
        await self.transport.start(self)
        try:
            while True:
                for name in ("n0", "n1"):
                    await self.greet(name, self.says[name])
                await asyncio.sleep(0.1)
        finally:
            for task in self.answers.values():
                task.cancel()
            await asyncio.gather(*self.answers.values(), return_exceptions=True)


def test_neighbour_pays_for_a_wait_that_it_was_not_expected_to_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    budget = 8.0
    monkeypatch.setitem(globals(), "TIMEOUTS", replace(TIMEOUTS, budget=budget))
    honest, seconds = run_with(Surprising(), tmp_path)
    assert seconds <= budget + ROUNDS * MIN_REFUND_SECONDS + Surprising.LATE_SECONDS
    assert "neighbour slowed the network: node=n2" in caplog.text
    for peer in honest:
        assert len(round_events(peer)) == ROUNDS


class ByzantineInFedSPD(Byzantine):
    manifest = FEDSPD


def test_peer_that_announces_no_cluster_does_not_lead_the_alignment(tmp_path: Path) -> None:
    """It has the lowest note of all, but no model to match labels with."""
    byzantine = ByzantineInFedSPD(
        lambda t: announce(t, clusters=(NO_CLUSTER,), weights=(1.0,), note=-5), refuse
    )
    for peer in run_with(byzantine, tmp_path)[0]:
        rounds = [event["round"] for event in round_events(peer)]
        assert rounds == list(range(1, ROUNDS + 1))
        # node 0 follows itself, node 1 follows node 0 from one hop away
        assert peer.runner.state.note_C.tolist() == [peer.context.client]
