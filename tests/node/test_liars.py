"""A neighbour that lies costs the others its own voice, and little time: over the in-memory transport, whose checks are the wire's."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fedspd.build import build
from fedspd.config import as_dict, validate
from fedspd.core.errors import Refused, TransportError
from fedspd.engines.block import BlockRunner
from fedspd.node.journal import Journal
from fedspd.node.manifest import Manifest, Member
from fedspd.node.memory import MemoryTransport, Network
from fedspd.node.patience import CHANCES, Patience
from fedspd.node.peer import Peer
from fedspd.node.place import Place
from fedspd.node.transport import Announcement, Hello, Offer, Request

ROUNDS = 12
CONFIG = validate({"method": "fedavg", "clients": 3, "clusters": 1, "rounds": ROUNDS, "data": {"name": "digits", "examples": 30},
                   "topology": {"kind": "complete"}, "model": {"name": "linear"}})  # fmt: skip
PATIENCE = Patience(start=60, least=1, most=3, beat=0.1, silence=30, leave=0.2)
EXPERIMENT = build(CONFIG)
MEMBERS = tuple(Member(f"n{i}", i, f"host:{7000 + i}", tuple(f"n{j}" for j in range(3) if j != i), i + 1) for i in range(3))
MANIFEST = Manifest(
    "0" * 32,
    False,
    as_dict(CONFIG),
    EXPERIMENT.federation.shape,
    EXPERIMENT.federation.classes,
    EXPERIMENT.plan.learner.size,
    "float32",
    MEMBERS,
)
HONEST = Announcement(1, 0, (0,), (30.0,), (0,), 0, 2)


class Liar:
    """Node 2 says hello like the others, and then whatever the test wants."""

    def __init__(self, says: Callable[[int], Announcement], gives: Callable[[Request], Offer]) -> None:
        self.says, self.gives, self.round = says, gives, 1

    def hello(self, sender: str, said: Hello) -> Hello:
        return Hello(MANIFEST.agreement, self.round, "host:7002")

    def announced(self, sender: str, announcement: Announcement) -> None:
        self.round = max(self.round, announcement.round)

    def offered(self, sender: str, request: Request) -> Offer:
        return self.gives(request)

    async def live(self, network: Network) -> None:
        transport = MemoryTransport(network, MANIFEST, "n2")
        await transport.start(self)
        while True:
            for name in ("n0", "n1"):
                try:
                    await transport.hello(name, self.hello(name, Hello("", 0, "")), 1)
                    await transport.announce(name, self.says(self.round), 1)
                except TransportError:
                    pass
            await asyncio.sleep(0.02)


def peer(i: int, network: Network, folder: Path) -> Peer:
    near = {f"n{j}": j for j in range(3) if j != i}
    place = Place(f"n{i}", i, f"host:{7000 + i}", near, MANIFEST.agreement, ROUNDS, "uniform", 1)
    journal = Journal(folder / place.name, {"network": MANIFEST.network, "node": place.name, "agreement": MANIFEST.agreement})
    runner = BlockRunner(build(CONFIG).plan.part(range(i, i + 1)))
    return Peer(place, runner, journal, MemoryTransport(network, MANIFEST, place.name), PATIENCE)


async def two_honest(liar: Liar, folder: Path) -> list[Peer]:
    network: Network = {}
    honest = [peer(i, network, folder) for i in range(2)]
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        lying = asyncio.create_task(liar.live(network))
        await asyncio.gather(*(each.live() for each in honest))
        lying.cancel()
    return honest


def refuse(request: Request) -> Offer:
    raise Refused("not now.")


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
        assert all(other.place.name in event["heard"] for event in events)
        assert sum("n2" in event["heard"] for event in events) <= 1  # the last round, if that is what it always announces
        slow = [event for event in events if event["seconds"]["waiting"] > PATIENCE.least]
        assert len(slow) <= CHANCES + 1


class Deaf(Liar):
    """Takes part in every round, and refuses to be told of any."""

    def announced(self, sender: str, announcement: Announcement) -> None:
        super().announced(sender, announcement)
        raise Refused("not listening.")


def test_a_neighbour_that_refuses_to_be_told_is_waited_for_only_so_often(tmp_path: Path) -> None:
    honest = asyncio.run(two_honest(Deaf(lambda t: at(t), model(0.0)), tmp_path))
    for one in honest:
        waits = [event["seconds"]["waiting"] for event in one.journal.record.events() if event["event"] == "round"]
        assert len(waits) == ROUNDS
        assert sum(seconds > PATIENCE.least for seconds in waits) <= CHANCES + 1
