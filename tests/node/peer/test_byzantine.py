"""A neighbour that lies costs the others its own voice, and little time: over the in-memory transport, whose checks are the wire's."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fedspd.config import ExperimentConfig, as_dict, validate
from fedspd.core.errors import RejectedError, TransportError
from fedspd.core.ledger import NO_CLUSTER
from fedspd.experiment.build import build_experiment
from fedspd.node.identity.manifest import Manifest, Member
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import CHANCES, Timeouts
from fedspd.node.peer.peer import Peer
from fedspd.node.wire.memory import MemoryNetwork
from fedspd.node.wire.messages import Announcement, Hello, Offer, Request
from fedspd.runtime.block_runner import BlockRunner

ROUNDS = 12
COMMON = {"clients": 3, "rounds": ROUNDS, "data": {"name": "digits", "examples": 30}, "topology": {"kind": "complete"},
          "model": {"name": "linear"}}  # fmt: skip
PATIENCE = Timeouts(start=60, least=1, most=3, beat=0.1, silence=30, leave=0.2)
MEMBERS = tuple(
    Member(f"n{i}", i, f"host:{7000 + i}", tuple(f"n{j}" for j in range(3) if j != i), i + 1)
    for i in range(3)
)


def manifest_of(config: ExperimentConfig) -> Manifest:
    experiment = build_experiment(config)
    federation, size = experiment.federation, experiment.plan.learner.size
    return Manifest(
        "0" * 32,
        False,
        as_dict(config),
        federation.shape,
        federation.classes,
        size,
        "float32",
        MEMBERS,
    )


FEDAVG = manifest_of(validate({**COMMON, "method": "fedavg", "clusters": 1}))
FEDSPD = manifest_of(
    validate({**COMMON, "method": "fedspd", "clusters": 2, "fedspd": {"align_every": 2}})
)
HONEST = Announcement(1, 0, (0,), (30.0,), (0,), 0, 2)


class Liar:
    """Node 2 says hello like the others, and then whatever the test wants."""

    manifest = FEDAVG

    def __init__(
        self, says: Callable[[int], Announcement], gives: Callable[[Request], Offer]
    ) -> None:
        self.says, self.gives, self.round = says, gives, 1

    def handle_hello(self, sender: str, hello: Hello) -> Hello:
        return Hello(self.manifest.agreement, self.round, "host:7002")

    def handle_announcement(self, sender: str, announcement: Announcement) -> None:
        self.round = max(self.round, announcement.round)

    def handle_request(self, sender: str, request: Request) -> Offer:
        return self.gives(request)

    async def live(self, network: MemoryNetwork) -> None:
        transport = network.transport(self.manifest, "n2")
        await transport.start(self)
        while True:
            for name in ("n0", "n1"):
                try:
                    await transport.hello(name, self.handle_hello(name, Hello("", 0, "")), 1)
                    await transport.announce(name, self.says(self.round), 1)
                except TransportError:
                    pass
            await asyncio.sleep(0.02)


def peer(i: int, network: MemoryNetwork, manifest: Manifest, folder: Path) -> Peer:
    near = {f"n{j}": j for j in range(3) if j != i}
    place = NodeContext(
        f"n{i}", i, f"host:{7000 + i}", near, manifest.agreement, ROUNDS, "uniform", 1
    )
    journal = Journal(
        folder / place.name,
        {"network": manifest.network, "node": place.name, "agreement": manifest.agreement},
    )
    runner = BlockRunner(
        build_experiment(validate(manifest.config)).plan.select_clients(range(i, i + 1))
    )
    return Peer(place, runner, journal, network.transport(manifest, place.name), PATIENCE)


async def two_honest(liar: Liar, folder: Path) -> list[Peer]:
    network = MemoryNetwork()
    honest = [peer(i, network, liar.manifest, folder) for i in range(2)]
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        lying = asyncio.create_task(liar.live(network))
        await asyncio.gather(*(each.live() for each in honest))
        lying.cancel()
    return honest


def refuse(request: Request) -> Offer:
    raise RejectedError("not now.")


def model(value: float) -> Callable[[Request], Offer]:
    return lambda request: Offer((0,), torch.full((1, request.size), value))


def at(round: int, **changes: object) -> Announcement:
    return Announcement(**{**HONEST.__dict__, "round": round, **changes})


@pytest.mark.parametrize(
    "liar",
    [
        Liar(lambda t: at(t), model(float("nan"))),
        Liar(lambda t: at(t), refuse),
        Liar(lambda t: at(t), lambda request: Offer((0,), torch.zeros(1, request.size - 1))),
        Liar(lambda t: at(t, clusters=(0, -1), weights=(1.0, 1.0)), model(0.0)),
        Liar(lambda t: at(ROUNDS), model(0.0)),
        Liar(lambda t: at(ROUNDS + 1), model(0.0)),
    ],
    ids=["not a number", "announces, but never gives", "wrong shape", "too many models", "always from the last round", "no such round"],
)  # fmt: skip
def test_the_honest_go_on_with_one_another(liar: Liar, tmp_path: Path) -> None:
    honest = asyncio.run(two_honest(liar, tmp_path))
    for one, other in zip(honest, reversed(honest), strict=True):
        events = [event for event in one.journal.record.events() if event["event"] == "round"]
        assert [event["round"] for event in events] == list(range(1, ROUNDS + 1))
        assert all(other.place.name in event["received"] for event in events)
        assert (
            sum("n2" in event["received"] for event in events) <= 1
        )  # the last round, if that is what it always announces
        slow = [event for event in events if event["seconds"]["waiting"] > PATIENCE.least]
        assert len(slow) <= CHANCES + 1


class Deaf(Liar):
    """Takes part in every round, and refuses to be told of any."""

    def handle_announcement(self, sender: str, announcement: Announcement) -> None:
        super().handle_announcement(sender, announcement)
        raise RejectedError("not listening.")


def test_a_neighbour_that_refuses_to_be_told_is_waited_for_only_so_often(tmp_path: Path) -> None:
    honest = asyncio.run(two_honest(Deaf(lambda t: at(t), model(0.0)), tmp_path))
    for one in honest:
        waits = [
            event["seconds"]["waiting"]
            for event in one.journal.record.events()
            if event["event"] == "round"
        ]
        assert len(waits) == ROUNDS
        assert sum(seconds > PATIENCE.least for seconds in waits) <= CHANCES + 1


class InFedSPD(Liar):
    manifest = FEDSPD


def test_a_neighbour_that_announces_no_cluster_does_not_lead_the_labels(tmp_path: Path) -> None:
    """With the lowest note of all, but no model that labels could be matched with."""
    nobody = InFedSPD(lambda t: at(t, clusters=(NO_CLUSTER,), weights=(1.0,), note=-5), refuse)
    for one in asyncio.run(two_honest(nobody, tmp_path)):
        assert [
            event["round"] for event in one.journal.record.events() if event["event"] == "round"
        ] == list(range(1, ROUNDS + 1))
        assert one.runner.state.note_C.tolist() == [
            one.place.client
        ]  # 0 follows itself, 1 follows 0 from one hop away
