"""Found by a partition that healed: news of the past must neither be told for ever nor be taken for the present."""

import asyncio
from typing import Any, cast

import pytest

from fedspd.core.errors import RejectedError, UnreachableError
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.inbox import ExchangeId
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.protocol import ExchangeProtocol
from fedspd.node.wire.messages import Announcement, Hello

LIMIT = 60.0  # seconds


class Nobody:
    """The transport of a node that reaches nobody."""

    def __init__(self) -> None:
        self.calls = 0

    async def announce(
        self, neighbour: str, announcement: Announcement, timeout_seconds: float
    ) -> None:
        self.calls += 1
        raise UnreachableError("nobody is there.")


def conversation(transport: Nobody) -> ExchangeProtocol:
    context = NodeContext(
        "a", 0, "host:1", {"b": 1}, "agreed", rounds=20, rule="uniform", evaluate_every=1
    )
    return ExchangeProtocol(context, cast(Any, None), cast(Any, transport), Timeouts())


def of_round(round: int) -> Announcement:
    return Announcement(round, 0, (0,), (1.0,), (0,), 0, 1)


def test_a_late_announcement_does_not_set_a_neighbour_back():
    protocol = conversation(Nobody())
    protocol.advance(ExchangeId(7, 0))
    protocol.handle_announcement("b", of_round(8))
    with pytest.raises(RejectedError, match="round 6, exchange 0 is over"):
        protocol.handle_announcement("b", of_round(6))
    assert protocol.detector.neighbours["b"].round == 8


def test_a_neighbour_that_restarts_says_so_and_is_believed():
    protocol = conversation(Nobody())
    protocol.advance(ExchangeId(7, 0))
    protocol.handle_announcement("b", of_round(8))
    protocol.handle_hello("b", Hello("agreed", 5, "host:2"))
    assert protocol.detector.neighbours["b"].round == 5


def test_nobody_is_told_what_is_over():
    async def told() -> int:
        transport = Nobody()
        protocol = conversation(transport)
        protocol.advance(ExchangeId(1, 0))
        telling = asyncio.create_task(protocol._announce("b", of_round(1)))
        async with asyncio.timeout(LIMIT):
            while transport.calls < 2:
                await asyncio.sleep(0.01)
            protocol.advance(ExchangeId(2, 0))
            await telling
        return transport.calls

    assert 2 <= asyncio.run(told()) <= 4
