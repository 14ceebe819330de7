"""The round loop of one peer: a block of one client, whose exchanges its neighbours answer.

There is neither a barrier nor a leader.
"""

import asyncio
import logging
import time
from typing import Any

from fedspd.core.errors import NodeError
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.robust import ROBUST
from fedspd.node.peer.answers import Answer, build_neighbourhood
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.inbox import ExchangeId
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import Pace, Timeouts
from fedspd.node.peer.privacy import NodePrivacy
from fedspd.node.peer.protocol import ExchangeProtocol
from fedspd.node.peer.sanity import Judge, find_outsized, is_finite, own_loss, shares_finite
from fedspd.node.wire.messages import JOINING, Announcement, Offer, Transport
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json

log = logging.getLogger("fedspd.node")

LONG_ROUND = 4  # exchanges; a longer round is given up once the network has left it behind


class Peer:
    """One node of a network: it trains, exchanges models with its neighbours and commits."""

    def __init__(
        self,
        context: NodeContext,
        runner: BlockRunner,
        journal: Journal,
        transport: Transport,
        timeouts: Timeouts | None = None,
        privacy: NodePrivacy | None = None,
    ) -> None:
        self.context, self.runner, self.journal = context, runner, journal
        self.timeouts = timeouts or Timeouts()
        self.protocol = ExchangeProtocol(context, runner, transport, self.timeouts)
        self.protect(privacy)
        self.detector = self.protocol.detector
        self.pace, self.judge = Pace(self.protocol.clock), Judge(runner)
        self.refused_means = 0  # since the node started
        self._exchanges = 0  # of the current round
        self.is_leaving = False

    def protect(self, privacy: NodePrivacy | None) -> None:
        """Keep a ledger and use secret noise; None: the noise, if any, follows from the seed."""
        self.privacy = self.protocol.privacy = privacy

    def leave(self) -> None:
        """Finish the step, commit it and end."""
        self.is_leaving = True
        self.protocol.leave()

    async def run(self) -> None:
        """Run from the journal's last round to the personal model, or until `leave`."""
        journal = self.journal
        try:
            # before the first heartbeat, so that no neighbour hears of round 0
            done = await asyncio.to_thread(journal.restore, self.runner, self.context.is_newcomer)
            self.pace.record_return(done, journal.round_seconds, journal.idle_seconds)
            if done:
                self.detector.end_join()
            if self.privacy is not None:
                self.privacy.keep_shared()
            final = self.context.rounds + 1
            self.protocol.advance(ExchangeId(min(done + 1, final), 0))
            await self.protocol.start()
            await self._find_neighbours(done)
            await self._run_rounds(done + 1)
            if not self.is_leaving:
                await self._finish()
        finally:
            await self.protocol.stop()

    async def _find_neighbours(self, done: int) -> None:
        """Wait for all neighbours when a network starts, and briefly on a return or a join."""
        is_start = done == 0 and not self.context.is_newcomer
        await self.protocol.wait_until(
            lambda: self.is_leaving or self._has_all_neighbours() or self._is_overtaken(done),
            self.timeouts.start if is_start else self.timeouts.min_deadline,
        )
        if done < self.context.rounds and not self.is_leaving:
            self._log_missing(done + 1)
        if self.runner.state is None and not self.is_leaving:
            await self._join()

    def _log_missing(self, round: int) -> None:
        """Log the neighbours that a round begins without, and why."""
        for name in self.detector.neighbours:
            if not self.detector.is_alive(name):
                error = self.protocol.last_errors.get(name, "it has not called this node.")
                log.warning('neighbour missing: node=%s round=%d error="%s"', name, round, error)

    def _has_all_neighbours(self) -> bool:
        """Return whether every neighbour is alive, muted, or behind a link that works one way."""
        is_muted, detector = self.protocol.transport.is_muted, self.detector
        return all(
            detector.is_alive(name) or is_muted(name) or detector.is_half_open(name)
            for name in detector.neighbours
        )

    def _is_overtaken(self, done: int) -> bool:
        """Return whether the network goes on: by a majority, and the others cannot be reached.

        After a power cut all nodes are back in one round, and wait for each other. A newcomer
        waits as well, for more first models.
        """
        is_ahead = self.detector.confirmed_round() > done + 1 and not self.context.is_newcomer
        return is_ahead and all(
            self.detector.is_alive(name) or name in self.protocol.last_errors
            for name in self.detector.neighbours
        )

    async def _run_rounds(self, t: int) -> None:
        while t <= self.context.rounds and not self.is_leaving:
            t = self._skip_rounds(t)
            await self._run_round(t)
            t += 1

    def _skip_rounds(self, t: int) -> int:
        """Return the round to run next: that of a majority of the neighbours, if it is plausible.

        The last round is never skipped to: after it comes the final phase.
        """
        confirmed = self.detector.confirmed_round()
        if confirmed <= t + (not self.context.is_newcomer):
            if confirmed:
                self.pace.record_in_step(t)
            return t
        to = min(confirmed, self.context.rounds - 1, self.pace.plausible_round())
        said_by = ",".join(self.detector.witnesses(confirmed))
        if to <= t:
            return t
        log.info("rounds skipped: from=%d to=%d said=%d said_by=%s", t, to, confirmed, said_by)
        return to

    async def _run_round(self, t: int) -> None:
        """Run and commit a round; give up a long one that is over for the neighbours."""
        started, before = time.perf_counter(), self.runner.state
        self.protocol.advance(ExchangeId(t, 0))
        played = await self._play_round(t)
        if played is None:
            return
        answers, waited = played
        refused: list[str] = []
        if await asyncio.to_thread(self._is_ruined):
            refused = await self._repeat_alone(t, before, answers)
        received = sorted(set(answers) - set(refused))
        missing = sorted(set(self.detector.neighbours) - set(answers)) if self._exchanges else []
        seconds = {"total": time.perf_counter() - started, "waiting": waited}
        await self._commit(t, received, missing, refused, seconds)

    def _is_ruined(self) -> bool:
        """Return whether the round is to be repeated alone.

        Examples that are private have no say: what the node sends next would tell of them.
        """
        return self.judge.is_ruined() if self.privacy is None else not self._is_finite()

    def _is_finite(self) -> bool:
        return is_finite(self.runner) if self.privacy is None else shares_finite(self.runner)

    async def _play_round(self, t: int) -> tuple[dict[str, Answer], float] | None:
        """Return the last answers and the seconds of waiting; None if the round is given up."""
        waited, self._exchanges = 0.0, 0
        answers: dict[str, Answer] = {}
        if self.privacy is not None:
            self.privacy.begin_round(t)
        announcements = await asyncio.to_thread(self.runner.start_round, t)
        while announcements is not None:
            before, exchange = time.perf_counter(), self.runner.exchange
            answers = await self.protocol.run_exchange(ExchangeId(t, self._exchanges), exchange)
            waited += time.perf_counter() - before
            self._exchanges += 1
            if self._exchanges > LONG_ROUND and self.detector.confirmed_round() > t + 1:
                log.info("round abandoned: round=%d exchanges=%d", t, self._exchanges)
                return None
            announcements = await asyncio.to_thread(
                self.runner.advance, self._build_neighbourhood(exchange, answers)
            )
        return answers, waited

    async def _repeat_alone(self, t: int, before: Any, answers: dict[str, Answer]) -> list[str]:
        """Repeat a round without the neighbours; return those whose models are refused.

        If the node alone does no better, its own training is to blame, and all models count.
        """
        ruined = self.runner.state
        loss = await asyncio.to_thread(own_loss, self.runner)
        was_finite = self._is_finite()
        self.runner.state = before
        if self.privacy is not None:
            self.privacy.begin_round(t)  # the same noise, which is paid for
        announcements = await asyncio.to_thread(self.runner.start_round, t)
        while announcements is not None:
            alone = self._build_neighbourhood(self.runner.exchange, {})
            announcements = await asyncio.to_thread(self.runner.advance, alone)
        if not self._is_finite():
            raise NodeError(
                f"Round {t}: the training of this node diverged, its parameters are not finite; "
                "expected finite ones. Lower training.lr; the last committed round is intact."
            )
        own = await asyncio.to_thread(own_loss, self.runner)
        if was_finite and own >= loss:
            self.runner.state = ruined
            return []
        names = sorted(answers)
        log.warning(
            "mean refused: round=%d loss=%.3g own_loss=%.3g received=%s",
            t, loss, own, ",".join(names),
        )  # fmt: skip
        self.refused_means += 1
        return names

    async def _commit(
        self,
        t: int,
        received: list[str],
        missing: list[str],
        refused: list[str],
        seconds: dict[str, float],
    ) -> None:
        about: Json = {
            "received": received,
            "missing": missing,
            **({"refused": refused} if refused else {}),
            "seconds": {name: round(value, 6) for name, value in seconds.items()},
            "deadline": round(self.detector.deadline(), 3),
        }
        if self.privacy is not None:
            self.privacy.keep_shared()
            about["privacy"] = self.privacy.report()
        is_evaluated = t % self.context.evaluate_every == 0 or t == self.context.rounds
        await asyncio.to_thread(self.journal.commit, self.runner, t, about, is_evaluated)
        self.pace.record_round(seconds["total"])
        self.detector.end_join()
        self.protocol.advance(ExchangeId(t + 1, 0))
        log.info(
            "round committed: round=%d rounds=%d received=%s missing=%s seconds=%.1f",
            t,
            self.context.rounds,
            ",".join(received) or "none",
            ",".join(missing) or "none",
            seconds["total"],
        )

    def _build_neighbourhood(self, exchange: Exchange, answers: dict[str, Answer]) -> Neighbourhood:
        degree = len(self.detector.neighbours)
        context = self.context
        return build_neighbourhood(
            context.client, exchange, list(answers.values()), degree, context.rule
        )

    async def _finish(self) -> None:
        """Make the personal model, then stay while a neighbour may still fetch models."""
        t = self.context.rounds + 1
        await asyncio.to_thread(self.journal.finish, self.runner, t)
        log.info(
            "training finished: node=%s rounds=%d rounds_alone=%d",
            self.context.name,
            self.context.rounds,
            self.journal.count_rounds_alone(),
        )
        await self.protocol.greet()
        await self.protocol.wait_until(
            lambda: self.is_leaving or all(n.round >= t for n in self.detector.live_neighbours()),
            self.timeouts.linger,
        )

    async def _join(self) -> None:
        """Take a newcomer's first models from its neighbours, in the round that they are in."""
        blank, _ = await asyncio.to_thread(self.runner.blank_share)
        clusters, offers = tuple(blank.want_CM[0].tolist()), {}
        for name in [each.name for each in self.detector.live_neighbours()] if clusters else ():
            if offer := await self.protocol.fetch_shared(name, blank):
                offers[name] = offer
        if clusters and not offers:
            raise NodeError(
                "No neighbour gave its models to this newcomer; expected at least one. "
                "Start it again when a neighbour is up."
            )
        # beyond the model there may be checksums, of any size
        size = self.runner.plan.travelling_size
        is_outsized = find_outsized([offer.model_KP[:, :size] for offer in offers.values()])
        good = {
            name: offers[name] for name, bad in zip(offers, is_outsized, strict=True) if not bad
        }
        if await self._is_ruined_by(blank, good):
            good = {n: o for n, o in good.items() if not await self._is_ruined_by(blank, {n: o})}
            if await self._is_ruined_by(blank, good):
                good = {}  # as any client begins
                await self._is_ruined_by(blank, good)
        for name in offers.keys() - good.keys():
            self.protocol.refused[name] += 1
            log.warning("first models refused: node=%s", name)
        log.info("network joined: node=%s neighbours=%d", self.context.name, len(good))

    async def _is_ruined_by(self, blank: Exchange, offers: dict[str, Offer]) -> bool:
        """Start a newcomer from the mean of these models; return whether it is ruined then."""
        answers = []
        for name, offer in offers.items():
            weights = (1.0,) * len(offer.clusters)
            announcement = Announcement(0, JOINING, offer.clusters, weights, (), 0, 0)
            answers.append(Answer(self.detector.neighbours[name].client, announcement, offer))
        rule = self.context.rule if self.context.rule in ROBUST else "uniform"
        neighbourhood = build_neighbourhood(self.context.client, blank, answers, len(answers), rule)
        if self.privacy is not None:
            self.privacy.begin_join(neighbourhood)
        t = self.detector.confirmed_round()
        await asyncio.to_thread(self.runner.join, neighbourhood, t)
        return await asyncio.to_thread(self._is_ruined)
