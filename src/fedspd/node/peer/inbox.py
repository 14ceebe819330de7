"""Announcements that have come: a bounded number from each neighbour."""

from fedspd.core.errors import RejectedError
from fedspd.node.wire.messages import Announcement

Moment = tuple[int, int]  # round and exchange
KEPT = 16  # announcements of a neighbour: a few rounds of any method


class Inbox:
    def __init__(self) -> None:
        self._kept: dict[str, dict[Moment, Announcement]] = {}

    def put(self, sender: str, announcement: Announcement, now: Moment) -> None:
        """A neighbour that was restarted repeats itself, which is evaluate_newcomers; what is past is of no use to anybody."""
        moment = (announcement.round, announcement.exchange)
        if moment < now:
            raise RejectedError(
                f"round {moment[0]}, exchange {moment[1]} is over: this node is in round {now[0]}, exchange {now[1]}."
            )
        kept = self._kept.setdefault(sender, {})
        kept[moment] = announcement
        for old in sorted(kept)[: max(0, len(kept) - KEPT)]:
            del kept[old]

    def get(self, sender: str, moment: Moment) -> Announcement | None:
        return self._kept.get(sender, {}).get(moment)

    def forget(self, before: Moment) -> None:
        for kept in self._kept.values():
            for old in [moment for moment in kept if moment < before]:
                del kept[old]
