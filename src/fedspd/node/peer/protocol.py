"""The protocol between a node and its neighbours, and its side of one exchange.

A node announces in a few bytes the clusters that it offers and wants. It fetches a cluster that
it wants from every neighbour that announced it. The exchange ends when all awaited neighbours
have answered, or at the deadline.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

from torch import Tensor

from fedspd.core.errors import (
    MalformedError,
    RefusedError,
    RejectedError,
    TransportError,
)
from fedspd.core.exchange import Exchange
from fedspd.node.peer.answers import Answer, build_announcement, clusters_to_fetch, select_models
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.inbox import ExchangeId, Inbox
from fedspd.node.peer.liveness import MAX_TICK_SECONDS, ActiveClock, FailureDetector, Timeouts
from fedspd.node.peer.neighbour_log import NeighbourLog
from fedspd.node.peer.privacy import NodePrivacy
from fedspd.node.peer.sanity import MAX_EXAMPLES_RATIO, find_excess
from fedspd.node.wire.frames import TokenBucket
from fedspd.node.wire.messages import JOINING, Announcement, Hello, Offer, Request, Transport
from fedspd.runtime.block_runner import BlockRunner

log = logging.getLogger("fedspd.node")
Value = TypeVar("Value")

OFFERED_ROUNDS = 3  # rounds whose models a neighbour that is behind may still fetch
REPEATED_FETCHES, REPEATED_FETCHES_PER_SECOND = 20, 2  # of the same models, by a neighbour
OFFERED_EXCHANGES = 16  # at most, among them: a round may have a hundred
CALL_SECONDS = 5.0  # timeout of a call of a few bytes
BACKOFF_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)  # before a failed call is repeated
GRACE_SECONDS = 2.0  # for the exchange in progress of a node that leaves
MIN_TIMER_SECONDS = 0.001  # a timer may fire a little early


class ExchangeProtocol:
    """The handler of a node's neighbours, and the node's own calls to them."""

    def __init__(
        self, context: NodeContext, runner: BlockRunner, transport: Transport, timeouts: Timeouts
    ) -> None:
        self.context, self.runner, self.transport = context, runner, transport
        self.timeouts, self.clock = timeouts, ActiveClock()
        # a newcomer depends on the neighbours that are up, so it soon trusts a single one
        quorum_timeout = timeouts.min_deadline if context.is_newcomer else timeouts.start
        self.detector = FailureDetector(timeouts, context.neighbours, self.clock, quorum_timeout)
        self.privacy: NodePrivacy | None = None
        self.inbox = Inbox()
        self.offers: dict[ExchangeId, Exchange] = {}
        self._given: set[tuple[ExchangeId, str]] = set()  # the neighbours that fetched models
        self._repeats: dict[str, TokenBucket] = {}  # by neighbour
        self.refused: Counter[str] = Counter()  # models out of bounds, by neighbour
        self.current = ExchangeId(0, 0)
        self.last_errors: dict[str, str] = {}  # of neighbours whose last call failed
        self._log = NeighbourLog(self.clock)
        self._give_up_at = float("inf")  # time at which a leaving node ends its exchange
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Answer neighbours and send heartbeats."""
        await self.transport.start(self)
        self._spawn(self._send_heartbeats())
        self._spawn(self._keep_clock())

    async def stop(self) -> None:
        """Cancel all calls and stop answering."""
        for task in self._tasks:
            task.cancel()
        await self.transport.stop()

    def advance(self, to: ExchangeId) -> None:
        """Move to an exchange; discard past announcements and offers of much earlier rounds."""
        self.current = to
        self.inbox.discard(to)
        oldest = to.round - OFFERED_ROUNDS
        self.offers = {when: offer for when, offer in self.offers.items() if when.round > oldest}
        self._given = {one for one in self._given if one[0] in self.offers or one[0].round == 0}

    def leave(self) -> None:
        """End the exchange in progress after a grace period at the latest."""
        self._give_up_at = self.clock() + GRACE_SECONDS
        self._notify()

    # ---- waiting

    async def wait_until(
        self,
        condition: Callable[[], bool],
        timeout_seconds: float,
        next_change: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        """Wait until a condition holds, or for a timeout.

        Each change that a condition depends on calls `_notify`. A timer covers changes by time
        alone: a neighbour is marked as down, a leaving node gives up its exchange, or it is
        `next_change`.
        """
        end = self.clock() + timeout_seconds
        while not condition() and (now := self.clock()) < end:
            times = (end, self.detector.next_failure(), self._give_up_at, next_change())
            wake_up = min(time for time in times if time > now)
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(wake_up - now, MIN_TIMER_SECONDS)):
                    await self._changed.wait()

    def _notify(self) -> None:
        """Wake up `wait_until`, so that it looks at its condition again."""
        self._changed.set()

    # ---- calls of neighbours

    def handle_hello(self, sender: str, hello: Hello) -> Hello:
        """Answer a heartbeat."""
        self._add_unknown(sender)
        self._log.log_round(sender, self.detector.neighbours[sender].round, hello.round)
        self._record_message(sender, hello.round)
        return self._build_hello()

    def handle_announcement(self, sender: str, announcement: Announcement) -> None:
        """Keep a neighbour's announcement."""
        self._add_unknown(sender)
        # an announcement may be late; only a hello sets a restarted neighbour back
        known = self.detector.neighbours[sender].round
        self._record_message(sender, max(known, announcement.round))
        self.inbox.put(sender, announcement, self.current)

    def handle_request(self, sender: str, request: Request) -> Offer:
        """Return the models that a neighbour requests."""
        self._add_unknown(sender)
        self._record_message(sender)
        if request.exchange == JOINING:
            if self.detector.neighbours[sender].client < self.context.clients:
                raise RejectedError("only a node that was added later may ask for all models.")
            self._limit_repeats(sender, ExchangeId(0, JOINING))
            return self._offer_to_newcomer(sender, request)
        exchange_id = ExchangeId(request.round, request.exchange)
        exchange = self.offers.get(exchange_id)
        if exchange is None:
            raise RejectedError(
                f"nothing is on offer here for round {request.round}; "
                f"this node is in round {self.current.round}."
            )
        self._limit_repeats(sender, exchange_id)
        if self.privacy is not None:
            self.privacy.record_receiver(sender)
        return select_models(exchange.cluster_CK[0].tolist(), exchange.model_CKP[0], request)

    def _limit_repeats(self, sender: str, exchange_id: ExchangeId) -> None:
        """Reject a neighbour that fetches the same models again and again."""
        if (exchange_id, sender) in self._given:
            size, rate = REPEATED_FETCHES, REPEATED_FETCHES_PER_SECOND
            bucket = self._repeats.setdefault(sender, TokenBucket(size, rate, self.clock))
            if bucket.is_empty():
                raise RejectedError(
                    f"'{sender}' has fetched these models already; try again later."
                )
            bucket.take(1)
        self._given.add((exchange_id, sender))

    def handle_mute(self, neighbour: str) -> None:
        """Stop waiting for a neighbour that the transport has muted."""
        self._notify()

    def _offer_to_newcomer(self, sender: str, request: Request) -> Offer:
        if self.runner.state is None:
            raise RejectedError("this node has not begun yet.")
        if self.privacy is None:
            shared = self.runner.shared()
        else:
            shared = self.privacy.offer_to_newcomer(sender)
        return select_models(shared.cluster_CK[0].tolist(), shared.model_CKP[0], request)

    def _add_unknown(self, sender: str) -> None:
        """Add a newcomer; the transport has checked that it is a neighbour."""
        if sender not in self.detector.neighbours:
            self.detector.add(sender, self.transport.client_of(sender))
            log.info("neighbour joined: node=%s", sender)

    def _record_message(self, name: str, round: int | None = None) -> None:
        self.detector.record_message(name, round)
        self._notify()

    def _build_hello(self) -> Hello:
        return Hello(self.context.agreement, self.current.round, self.context.address)

    # ---- calls of this node

    async def run_exchange(self, exchange_id: ExchangeId, exchange: Exchange) -> dict[str, Answer]:
        """Return the answers by neighbour, without those that are silent past the deadline."""
        self.current, self.offers[exchange_id] = exchange_id, exchange
        for oldest in sorted(self.offers)[:-OFFERED_EXCHANGES]:
            del self.offers[oldest]
        if exchange_id.number == 0:
            self.detector.begin_round()
        neighbours, started = self.detector.neighbours, self.clock()
        rule = self.context.rule
        announcement = build_announcement(exchange_id, exchange, len(neighbours), rule)
        announcing = {name: self._spawn(self._announce(name, announcement)) for name in neighbours}
        receiving = {
            name: self._spawn(self._receive(name, exchange_id, exchange)) for name in neighbours
        }

        over_after: dict[str, float] = {}  # seconds, by neighbour

        # if a neighbour first learned of this node's next round, it would not wait for this one
        def is_over(name: str) -> bool:
            is_informed = announcing[name].done() or neighbours[name].round > exchange_id.round
            if receiving[name].done() and is_informed:
                over_after.setdefault(name, self.clock() - started)
            return name in over_after

        def is_pending(name: str) -> bool:
            return not is_over(name) and self._is_expected(name, exchange_id)

        def ends_at(name: str) -> float:
            return started + self.detector.patience(name)

        awaited = {name for name in receiving if self._is_expected(name, exchange_id)}

        # one that is down or ahead when the exchange begins, and then is not, costs time as well
        def is_awaited(name: str) -> bool:
            if is_found := is_pending(name) and self.clock() < ends_at(name):
                awaited.add(name)
            return is_found

        await self.wait_until(
            lambda: self.clock() >= self._give_up_at or not any(map(is_awaited, receiving)),
            self.timeouts.max_deadline,
            lambda: min((ends_at(name) for name in receiving if is_awaited(name)), default=inf),
        )
        received = {
            name: result
            for name, task in receiving.items()
            if task.done() and (result := task.result()) is not None
        }
        waited = self.clock() - started
        seconds = {name: over_after.get(name, waited) for name in awaited}
        self.detector.charge(seconds, is_new_round=exchange_id.number == 0)
        for name, task in receiving.items():
            if is_pending(name):
                self.detector.record_missed_deadline(name, exchange_id.round)
            elif name in received and is_over(name):
                self.detector.record_response(name, over_after[name])
            task.cancel()
        return received

    async def fetch_shared(self, name: str, blank: Exchange) -> Offer | None:
        """Return the models that a neighbour gives to a newcomer; None unless it gives all."""
        clusters, size = tuple(blank.want_CM[0].tolist()), blank.model_CKP.shape[2]
        request = Request(0, JOINING, clusters, size)
        offer = await self._retry(
            name,
            lambda: self.transport.fetch(name, request, self.timeouts.max_deadline),
            2 * CALL_SECONDS,
        )
        if offer is not None and sorted(offer.clusters) != sorted(clusters):
            problem = f"offers a newcomer the clusters {list(offer.clusters)}"
            self._record_error(name, MalformedError(f"{problem}; expected {list(clusters)}."))
            return None
        if offer is not None and self._refuses(
            name, blank.model_CKP[0], offer, has_parameters=False
        ):
            return None
        return offer

    def _is_expected(self, name: str, exchange_id: ExchangeId) -> bool:
        """Return whether to wait for a neighbour; one that is ahead announces nothing more.

        One that missed a deadline is not waited for in the other exchanges of the round.
        """
        neighbour = self.detector.neighbours[name]
        is_ahead = neighbour.round > exchange_id.round or self.inbox.latest(name) > exchange_id
        is_late = neighbour.missed_round == exchange_id.round
        may_answer = not (is_ahead or is_late) or self.inbox.get(name, exchange_id) is not None
        return may_answer and self.detector.is_awaited(name) and not self.transport.is_muted(name)

    async def _announce(self, name: str, announcement: Announcement) -> None:
        """Announce an exchange until it is over: a neighbour that returns needs no old news."""
        exchange_id = ExchangeId(announcement.round, announcement.exchange)
        if self.privacy is not None:
            self.privacy.record_announcement(name)
        await self._retry(
            name,
            lambda: self.transport.announce(name, announcement, CALL_SECONDS),
            self.detector.deadline(),
            lambda: exchange_id == self.current,
        )

    async def _receive(
        self, name: str, exchange_id: ExchangeId, exchange: Exchange
    ) -> Answer | None:
        """Return a neighbour's answer, or None if it cannot be used; the exchange cancels it."""
        announcement = await self.inbox.wait(name, exchange_id)
        offered, expected = len(announcement.clusters), exchange.cluster_CK.shape[1]
        if offered != expected:
            problem = f"offers {offered} models in round {exchange_id.round}"
            self._record_error(name, MalformedError(f"{problem}; expected {expected}."))
            return None
        offer: Offer | None = Offer((), exchange.model_CKP[0, :0])
        if wants := clusters_to_fetch(exchange, announcement):
            size = exchange.model_CKP.shape[2]
            request = Request(*exchange_id, wants, size, exchange.is_model)
            offer = await self._retry(
                name, lambda: self.transport.fetch(name, request, self.timeouts.max_deadline)
            )
        if offer is None or self._refuses(
            name, self.runner.own_models, offer, exchange.has_parameters
        ):
            return None
        client = self.detector.neighbours[name].client
        return Answer(client, self._limit_weights(announcement), offer)

    def _refuses(self, name: str, own_KP: Tensor, offer: Offer, has_parameters: bool) -> bool:
        """Return whether a neighbour's vectors are far beyond one's own, and say so."""
        excess = find_excess(own_KP, offer.model_KP, has_parameters)
        if excess is None:
            return False
        self.refused[name] += 1
        log.warning('model refused: node=%s round=%d reason="%s"', name, self.current.round, excess)
        self.last_errors[name] = excess
        return True

    def _limit_weights(self, announcement: Announcement) -> Announcement:
        """Return the announcement with at most so many examples as this node finds plausible."""
        if self.context.rule != "examples":
            return announcement
        own = 1 if self.privacy is not None else int(self.runner.plan.train.counts_C[0])
        limit = MAX_EXAMPLES_RATIO * own  # a private node tells nobody how many it has
        weights = tuple(min(weight, limit) for weight in announcement.weights)
        return replace(announcement, weights=weights)

    async def _retry(
        self,
        name: str,
        call: Callable[[], Awaitable[Value]],
        timeout_seconds: float = float("inf"),
        is_useful: Callable[[], bool] = lambda: True,
    ) -> Value | None:
        """Repeat a call until it succeeds, or return None.

        Networks fail for a while, and a restarted neighbour has nothing to offer at first. A
        malformed answer is final.
        """
        end, attempts = self.clock() + timeout_seconds, 0
        while True:
            try:
                value = await call()
                self._record_success(name)
                return value
            except TransportError as error:
                self._record_error(name, error)
                if isinstance(error, MalformedError) or self.clock() > end or not is_useful():
                    return None
            await asyncio.sleep(BACKOFF_SECONDS[min(attempts, len(BACKOFF_SECONDS) - 1)])
            attempts += 1

    # ---- heartbeats

    async def greet(self) -> None:
        """Tell every neighbour the round of this node."""
        await asyncio.gather(*(self._send_heartbeat(name) for name in self.detector.neighbours))

    async def _send_heartbeats(self) -> None:
        while True:
            for name in self.detector.neighbours:
                round = self.detector.neighbours[name].round
                is_up, error = self.detector.is_alive(name), self.last_errors.get(name)
                self._log.log_liveness(name, is_up, round, error)
                if self.detector.is_heartbeat_due(name):
                    self._spawn(self._send_heartbeat(name))
            await asyncio.sleep(self.timeouts.heartbeat_interval)

    async def _send_heartbeat(self, name: str) -> None:
        try:
            answer = await self.transport.hello(name, self._build_hello(), CALL_SECONDS)
            self._record_success(name, answer.round)
        except TransportError as error:
            self._record_error(name, error)

    async def _keep_clock(self) -> None:
        """Read the clock often enough that it misses no time while the node trains or waits."""
        while True:
            self.clock()
            await asyncio.sleep(MAX_TICK_SECONDS / 4)

    def _record_success(self, name: str, round: int | None = None) -> None:
        self.detector.record_reached(name, round)
        self.last_errors.pop(name, None)
        self._notify()

    def _record_error(self, name: str, error: TransportError) -> None:
        """Keep an error for the status and the log, and mark a refused connection as down."""
        self._log.log_error(name, error)
        self.last_errors[name] = str(error)
        if isinstance(error, RefusedError):
            self.detector.record_refused(name)
            self._notify()

    def _spawn(self, work: Coroutine[Any, Any, Value]) -> asyncio.Task[Value]:
        """Start a task whose end is a change that `wait_until` looks at."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._notify()
