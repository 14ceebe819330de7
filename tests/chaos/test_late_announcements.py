"""Announcements of past exchanges, as they arrive when a partition heals."""

import asyncio
from typing import Any, cast

import pytest

from chaos.virtual_time import run_instantly
from fedspd.core.errors import RejectedError, UnreachableError
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.inbox import ExchangeId
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.protocol import ExchangeProtocol
from fedspd.node.wire.messages import Announcement, Hello

TIMEOUT = 60.0  # seconds


class UnreachableTransport:
    """The transport of a node that reaches nobody."""

    def __init__(self) -> None:
        self.calls = 0

    async def announce(
        self, neighbour: str, announcement: Announcement, timeout_seconds: float
    ) -> None:
        self.calls += 1
        raise UnreachableError(f"'{neighbour}' is unreachable.")


def build_protocol(transport: UnreachableTransport) -> ExchangeProtocol:
    context = NodeContext(
        "a", 0, "host:1", {"b": 1}, "agreed", rounds=20, rule="uniform", evaluate_every=1
    )
    return ExchangeProtocol(context, cast(Any, None), cast(Any, transport), Timeouts())


def announcement_of(round: int) -> Announcement:
    return Announcement(round, 0, (0,), (1.0,), (0,), 0, 1)


@pytest.fixture
def protocol() -> ExchangeProtocol:
    """The protocol of a node in round 7, whose neighbour b is in round 8."""
    found = build_protocol(UnreachableTransport())
    found.advance(ExchangeId(7, 0))
    found.handle_announcement("b", announcement_of(8))
    return found


def test_late_announcement_does_not_set_a_neighbour_back(protocol):
    with pytest.raises(RejectedError, match="round 6, exchange 0 is over"):
        protocol.handle_announcement("b", announcement_of(6))
    assert protocol.detector.neighbours["b"].round == 8


def test_hello_sets_a_restarted_neighbour_back(protocol):
    protocol.handle_hello("b", Hello("agreed", 5, "host:2"))
    assert protocol.detector.neighbours["b"].round == 5


def test_node_stops_announcing_an_exchange_that_is_over():
    async def count_calls() -> int:
        transport = UnreachableTransport()
        protocol = build_protocol(transport)
        protocol.advance(ExchangeId(1, 0))
        announcing = asyncio.create_task(protocol._announce("b", announcement_of(1)))
        async with asyncio.timeout(TIMEOUT):
            while transport.calls < 2:
                await asyncio.sleep(0.01)
            protocol.advance(ExchangeId(2, 0))
            await announcing
        return transport.calls

    assert 2 <= run_instantly(count_calls()) <= 4
