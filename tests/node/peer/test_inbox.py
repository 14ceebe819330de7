"""The inbox keeps a bounded number of announcements of each neighbour."""

import asyncio

import pytest

from fedspd.core.errors import RejectedError
from fedspd.node.peer.inbox import ANNOUNCEMENTS_KEPT, ExchangeId, Inbox
from fedspd.node.wire.messages import Announcement


def announce(round: int, exchange: int = 0, note: int = 0) -> Announcement:
    return Announcement(round, exchange, (0,), (1.0,), (0,), note, 2)


def test_inbox_keeps_an_announcement_until_its_exchange_is_over() -> None:
    inbox = Inbox()
    inbox.put("a", announce(3), current=ExchangeId(2, 0))
    assert inbox.get("a", ExchangeId(3, 0)) == announce(3)
    assert inbox.get("b", ExchangeId(3, 0)) is None
    inbox.discard(ExchangeId(3, 1))
    assert inbox.get("a", ExchangeId(3, 0)) is None


def test_inbox_rejects_a_past_exchange_and_names_both_rounds() -> None:
    sentence = "round 2, exchange 0 is over; this node is in round 2, exchange 1"
    with pytest.raises(RejectedError, match=sentence):
        Inbox().put("a", announce(2), current=ExchangeId(2, 1))


def test_inbox_replaces_the_announcement_of_a_restarted_neighbour() -> None:
    inbox = Inbox()
    inbox.put("a", announce(3, note=1), current=ExchangeId(3, 0))
    inbox.put("a", announce(3, note=2), current=ExchangeId(3, 0))
    assert inbox.get("a", ExchangeId(3, 0)) == announce(3, note=2)


def test_inbox_bounds_the_announcements_of_each_neighbour() -> None:
    inbox, current = Inbox(), ExchangeId(1, 0)
    inbox.put("b", announce(1), current)
    for round in range(1, 1000):
        inbox.put("a", announce(round), current)
    kept = [round for round in range(1000) if inbox.get("a", ExchangeId(round, 0)) is not None]
    assert kept == list(range(1000 - ANNOUNCEMENTS_KEPT, 1000))
    assert inbox.get("b", ExchangeId(1, 0)) is not None


def test_inbox_wakes_the_reader_of_one_sender_and_exchange() -> None:
    async def wait_for_the_second() -> Announcement:
        inbox, current = Inbox(), ExchangeId(1, 0)
        reader = asyncio.create_task(inbox.wait("a", ExchangeId(2, 0)))
        for sender, round in (("a", 1), ("b", 2), ("a", 2)):
            await asyncio.sleep(0)
            assert not reader.done()
            inbox.put(sender, announce(round), current)
        return await reader

    assert asyncio.run(wait_for_the_second()) == announce(2)


def test_inbox_knows_the_latest_exchange_of_a_neighbour() -> None:
    inbox = Inbox()
    assert inbox.latest("a") == (0, 0)
    for exchange in (2, 5, 4):
        inbox.put("a", announce(3, exchange), current=ExchangeId(3, 1))
    assert inbox.latest("a") == (3, 5)
