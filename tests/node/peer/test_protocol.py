"""A node goes on only when it has been heard: who learned first of its next round would not wait for this one."""

import asyncio
from typing import Any, cast

import torch

from fedspd.core.exchange import Exchange
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.protocol import ExchangeProtocol
from fedspd.node.wire.messages import Announcement


class SlowPost:
    """A transport whose announcements arrive when they are let through."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def announce(
        self, neighbour: str, announcement: Announcement, timeout_seconds: float
    ) -> None:
        await self.open.wait()

    def is_muted(self, neighbour: str) -> bool:
        return False


async def answers_before_and_after() -> tuple[bool, list[str]]:
    """Whether the exchange was over before its news had arrived, and who was heard in the end."""
    post, place = (
        SlowPost(),
        NodeContext(
            "a", 0, "host:1", {"b": 1}, "agreed", rounds=9, rule="uniform", evaluate_every=1
        ),
    )
    talk = ExchangeProtocol(place, cast(Any, None), cast(Any, post), Timeouts())
    talk.now((1, 0))
    talk.handle_announcement(
        "b", Announcement(1, 0, (1,), (1.0,), (1,), 0, 1)
    )  # of another cluster: there is nothing to fetch
    cluster, one = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    exchange = asyncio.create_task(
        talk.exchange((1, 0), Exchange(cluster, torch.zeros(1, 1, 4), one, cluster))
    )
    await asyncio.wait([exchange], timeout=0.5)
    early = exchange.done()
    post.open.set()
    return early, list(await asyncio.wait_for(exchange, 60))


def test_an_exchange_is_over_when_the_neighbour_has_heard_of_it() -> None:
    assert asyncio.run(answers_before_and_after()) == (False, ["b"])
