"""The announcements of neighbours, a bounded number of each."""

import asyncio
from collections import defaultdict
from typing import NamedTuple

from fedspd.core.errors import RejectedError
from fedspd.node.wire.messages import Announcement

ANNOUNCEMENTS_KEPT = 16  # of each neighbour: a few rounds of any method


class ExchangeId(NamedTuple):
    """The position of an exchange in a run: its round, and its number within the round."""

    round: int
    number: int


class Inbox:
    """A bounded store of announcements by sender and exchange."""

    def __init__(self) -> None:
        self._kept: defaultdict[str, dict[ExchangeId, Announcement]] = defaultdict(dict)
        self._arrived: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def put(self, sender: str, announcement: Announcement, current: ExchangeId) -> None:
        """Keep an announcement, and reject one of an exchange that is over.

        A restarted neighbour repeats its announcements; the last one counts.
        """
        exchange_id = ExchangeId(announcement.round, announcement.exchange)
        if exchange_id < current:
            raise RejectedError(
                f"round {exchange_id.round}, exchange {exchange_id.number} is over; "
                f"this node is in round {current.round}, exchange {current.number}."
            )
        kept = self._kept[sender]
        kept[exchange_id] = announcement
        for oldest in sorted(kept)[:-ANNOUNCEMENTS_KEPT]:
            del kept[oldest]
        self._arrived[sender].set()

    def get(self, sender: str, exchange_id: ExchangeId) -> Announcement | None:
        """Return a sender's announcement of an exchange, or None before it arrives."""
        return self._kept[sender].get(exchange_id)

    def latest(self, sender: str) -> ExchangeId:
        """Return the latest exchange that a sender has announced and that is not over."""
        return max(self._kept[sender], default=ExchangeId(0, 0))

    async def wait(self, sender: str, exchange_id: ExchangeId) -> Announcement:
        """Return a sender's announcement of an exchange as soon as it arrives."""
        while (announcement := self.get(sender, exchange_id)) is None:
            self._arrived[sender].clear()
            await self._arrived[sender].wait()
        return announcement

    def discard(self, before: ExchangeId) -> None:
        """Discard the announcements of earlier exchanges."""
        for kept in self._kept.values():
            for over in [exchange_id for exchange_id in kept if exchange_id < before]:
                del kept[over]
