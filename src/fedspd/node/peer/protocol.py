"""A node and its neighbours: what they ask of it, and what it learns from them in one exchange.

First the node tells everybody what it offers and wants, in a few bytes. Whoever has announced a cluster that is wanted here
is asked for it. The exchange ends when all that are worth waiting for have answered, or at the deadline.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fedspd.core.errors import MalformedError, RejectedError, TransportError, UnreachableError
from fedspd.core.exchange import Exchange
from fedspd.node.peer.answers import Answer, announcement, matching, wanted
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.inbox import Inbox, Moment
from fedspd.node.peer.liveness import LAPSE, ActiveClock, FailureDetector, Timeouts
from fedspd.node.wire.messages import JOINING, Announcement, Hello, Offer, Request, Transport
from fedspd.runtime.block_runner import BlockRunner

log = logging.getLogger("fedspd.node")
Found = TypeVar("Found")

SERVED = 3  # rounds whose offers a neighbour that is behind may still fetch
CALL = 5.0  # seconds for a few bytes
PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)  # seconds before a failed call is repeated
GRACE = 2.0  # seconds that a node which leaves still waits for its neighbours
GLANCE = 0.01  # seconds between two looks at whether an exchange is over


class ExchangeProtocol:
    def __init__(
        self, place: NodeContext, runner: BlockRunner, transport: Transport, patience: Timeouts
    ) -> None:
        self.place, self.runner, self.transport = place, runner, transport
        self.clock = ActiveClock()
        hope = (
            patience.least if place.newcomer else patience.start
        )  # a newcomer depends on whoever is there anyway
        self.watch = FailureDetector(patience, place.neighbours, self.clock, hope)
        self.inbox = Inbox()
        self.offers: dict[Moment, Exchange] = {}
        self.moment: Moment = (0, 0)
        self.troubles: dict[str, str] = {}  # with every neighbour whose last call failed
        self._complaints: dict[str, str] = {}  # what was last written down about it
        self._leaving: float | None = None  # since when
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        await self.transport.start(self)
        self._in_background(self._heartbeats())
        self._in_background(self._attend())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.transport.stop()

    def now(self, moment: Moment) -> None:
        """A new moment: announcements of the past, and offers of the far past, are forgotten."""
        self.moment = moment
        self.inbox.forget(moment)
        self.offers = {
            when: offer for when, offer in self.offers.items() if when[0] > moment[0] - SERVED
        }

    def leave(self) -> None:
        """From now on neighbours are waited for no longer than it takes to end an exchange that all are in."""
        self._leaving = self.clock()

    def _late_to_leave(self) -> bool:
        return self._leaving is not None and self.clock() - self._leaving > GRACE

    # ---- what neighbours ask

    def handle_hello(self, sender: str, hello: Hello) -> Hello:
        self._meet(sender)
        self.watch.sign_of_life(sender, hello.round)
        return self._hello()

    def handle_announcement(self, sender: str, announcement: Announcement) -> None:
        if not 1 <= announcement.round <= self.place.rounds:
            raise MalformedError(
                f"round {announcement.round}: this network has rounds 1 to {self.place.rounds}."
            )
        self._meet(sender)
        known = self.watch.neighbours[sender].round
        self.watch.sign_of_life(
            sender, max(known, announcement.round)
        )  # an announcement may be late; who restarts says hello
        self.inbox.put(sender, announcement, self.moment)

    def handle_request(self, sender: str, request: Request) -> Offer:
        self._meet(sender)
        self.watch.sign_of_life(sender)
        if request.exchange == JOINING:
            return self._shared(request)
        asked = self.offers.get((request.round, request.exchange))
        if asked is None:
            raise RejectedError(
                f"nothing is on offer here for round {request.round}: this node is in round {self.moment[0]}."
            )
        return matching(asked.cluster_CK[0].tolist(), asked.model_CKP[0], request)

    def _shared(self, request: Request) -> Offer:
        if self.runner.state is None:
            raise RejectedError("this node has not begun yet.")
        cluster_CK, model_CKP = self.runner.plan.algorithm.share(self.runner.state)
        return matching(cluster_CK[0].tolist(), model_CKP[0], request)

    def _meet(self, sender: str) -> None:
        """The transport has checked that the sender may speak here: somebody new has joined."""
        if sender not in self.watch.neighbours:
            self.watch.meet(sender, self.transport.client_of(sender))
            log.info("%s has joined as a neighbour", sender)

    def _hello(self) -> Hello:
        return Hello(self.place.agreement, self.moment[0], self.place.address)

    # ---- what the node asks

    async def exchange(self, moment: Moment, asked: Exchange) -> dict[str, Answer]:
        """What each neighbour answered; whoever is silent past the deadline is not in it."""
        self.moment, self.offers[moment] = moment, asked
        said = announcement(moment, asked, len(self.watch.neighbours))
        told = {name: self._in_background(self._tell(name, said)) for name in self.watch.neighbours}
        started, limit = self.clock(), self.watch.deadline()
        tasks = {
            name: asyncio.create_task(self._hear(name, moment, asked))
            for name in self.watch.neighbours
        }

        def over_with(name: str) -> bool:
            """Heard, and told: who learned first of this node's next round would not wait for this one."""
            return tasks[name].done() and (
                told[name].done() or self.watch.neighbours[name].round > moment[0]
            )

        def open_with(name: str) -> bool:
            return not over_with(name) and self._expected(name, moment)

        await self.until(
            lambda: self._late_to_leave() or not any(open_with(name) for name in tasks), limit
        )
        heard = {
            name: found
            for name, task in tasks.items()
            if task.done() and (found := task.result()) is not None
        }
        for name, task in tasks.items():
            if open_with(name):
                self.watch.too_late(name, self.clock() - started)
            elif name in heard and over_with(name):
                self.watch.in_time(name, heard[name][1])
            task.cancel()
        return {name: answer for name, (answer, _) in heard.items()}

    async def fetch_shared(self, name: str, clusters: tuple[int, ...]) -> Offer | None:
        """What a neighbour gives to a newcomer: all these clusters, or it is of no use."""
        request = Request(0, JOINING, clusters, self.runner.plan.learner.size)
        offer = await self._persistently(
            name, lambda: self.transport.fetch(name, request, self.watch.patience.most), 2 * CALL
        )
        if offer is not None and sorted(offer.clusters) != sorted(clusters):
            self._trouble(
                name,
                MalformedError(
                    f"it gives a newcomer the clusters {list(offer.clusters)}: expected {list(clusters)}."
                ),
            )
            return None
        return offer

    async def until(self, condition: Callable[[], bool], limit: float) -> None:
        end = self.clock() + limit
        while not condition() and self.clock() < end:
            await asyncio.sleep(GLANCE)

    def _expected(self, name: str, moment: Moment) -> bool:
        """Worth waiting for, and not so far ahead that it will never announce this moment."""
        there = (
            self.watch.neighbours[name].round <= moment[0]
            or self.inbox.get(name, moment) is not None
        )
        return there and self.watch.worth_waiting(name) and not self.transport.is_muted(name)

    async def _tell(self, name: str, said: Announcement) -> None:
        """As long as it is news: one that comes back must not be told of all that it missed."""
        moment = said.round, said.exchange
        await self._persistently(
            name, lambda: self.transport.announce(name, said, CALL), self.watch.deadline(), lambda: moment == self.moment
        )  # fmt: skip

    async def _hear(
        self, name: str, moment: Moment, asked: Exchange
    ) -> tuple[Answer, float] | None:
        """The answer, and how long it took; None: it is of no use. Waits for as long as it takes; the exchange ends it."""
        started, offer = self.clock(), Offer((), asked.model_CKP[0, :0])
        while (said := self.inbox.get(name, moment)) is None:
            await asyncio.sleep(GLANCE)
        offered, usual = len(said.clusters), asked.cluster_CK.shape[1]
        if offered != usual:
            self._trouble(
                name,
                MalformedError(
                    f"it offers {offered} models in round {moment[0]}, where every node offers {usual}."
                ),
            )
            return None
        if wants := wanted(asked, said):
            request = Request(*moment, wants, asked.model_CKP.shape[2])
            fetched = await self._persistently(
                name, lambda: self.transport.fetch(name, request, self.watch.patience.most)
            )
            if fetched is None:
                return None
            offer = fetched
        return Answer(self.watch.neighbours[name].client, said, offer), self.clock() - started

    async def _persistently(
        self,
        name: str,
        call: Callable[[], Awaitable[Found]],
        limit: float = float("inf"),
        of_use: Callable[[], bool] = lambda: True,
    ) -> Found | None:
        """A network has moods, and a neighbour that was restarted has nothing to offer at first: ask again, but not for rubbish."""
        end, tries = self.clock() + limit, 0
        while True:
            try:
                found = await call()
                self._answered(name)
                return found
            except TransportError as error:
                self._trouble(name, error)
                if isinstance(error, MalformedError) or self.clock() > end or not of_use():
                    return None
            await asyncio.sleep(PAUSES[min(tries, len(PAUSES) - 1)])
            tries += 1

    # ---- keeping in touch

    async def greet(self) -> None:
        """Tell everybody at once how far this node is."""
        await asyncio.gather(*(self._beat(name) for name in self.watch.neighbours))

    async def _heartbeats(self) -> None:
        while True:
            for name in self.watch.neighbours:
                if self.watch.quiet(name):
                    self._in_background(self._beat(name))
            await asyncio.sleep(self.watch.patience.beat)

    async def _attend(self) -> None:
        """Keeps the clock running while the node trains."""
        while True:
            self.clock()
            await asyncio.sleep(LAPSE / 4)

    async def _beat(self, name: str) -> None:
        try:
            said = await self.transport.hello(name, self._hello(), CALL)
            self._answered(name, said.round)
        except TransportError as error:
            self._trouble(name, error)

    def _answered(self, name: str, round: int | None = None) -> None:
        self.watch.sign_of_life(name, round)
        self.troubles.pop(name, None)

    def _trouble(self, name: str, error: TransportError) -> None:
        """Nobody is there yet, or not any more: that is no news. The rest is told once."""
        if self._complaints.get(name) != str(error) and not isinstance(error, UnreachableError):
            self._complaints[name] = str(error)
            log.warning("%s: %s", name, error)
        self.troubles[name] = str(error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
