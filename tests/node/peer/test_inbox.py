import pytest

from fedspd.core.errors import RejectedError
from fedspd.node.peer.inbox import KEPT, Inbox
from fedspd.node.wire.messages import Announcement


def said(round: int, exchange: int = 0, note: int = 0) -> Announcement:
    return Announcement(round, exchange, (0,), (1.0,), (0,), note, 2)


def test_an_announcement_is_kept_until_its_moment_is_over() -> None:
    inbox = Inbox()
    inbox.put("a", said(3), now=(2, 0))
    assert inbox.get("a", (3, 0)) == said(3)
    assert inbox.get("b", (3, 0)) is None
    inbox.forget((3, 1))
    assert inbox.get("a", (3, 0)) is None


def test_what_is_past_is_refused_with_both_rounds() -> None:
    with pytest.raises(
        RejectedError, match="round 2, exchange 0 is over: this node is in round 2, exchange 1"
    ):
        Inbox().put("a", said(2), now=(2, 1))


def test_a_restarted_neighbour_replaces_what_it_said() -> None:
    inbox = Inbox()
    inbox.put("a", said(3, note=1), now=(3, 0))
    inbox.put("a", said(3, note=2), now=(3, 0))
    found = inbox.get("a", (3, 0))
    assert found is not None
    assert found.note == 2


def test_a_neighbour_can_fill_only_its_own_bounded_shelf() -> None:
    inbox = Inbox()
    inbox.put("b", said(1), now=(1, 0))
    for round in range(1, 1000):
        inbox.put("a", said(round), now=(1, 0))
    assert sum(inbox.get("a", (round, 0)) is not None for round in range(1000)) == KEPT
    assert inbox.get("a", (999, 0)) is not None
    assert inbox.get("b", (1, 0)) is not None
