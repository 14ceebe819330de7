"""One client of the network at work: a block of one, whose exchanges its neighbours answer. No barrier, no leader."""

import asyncio
import logging
import time

import torch

from fedspd.core.errors import NodeError
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.ledger import NO_CLUSTER
from fedspd.node.peer.answers import Answer, neighbourhood
from fedspd.node.peer.context import NodeContext
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import Timeouts
from fedspd.node.peer.protocol import ExchangeProtocol
from fedspd.node.wire.messages import JOINING, Announcement, Transport
from fedspd.runtime.block_runner import BlockRunner

log = logging.getLogger("fedspd.node")


class Peer:
    def __init__(
        self, place: NodeContext, runner: BlockRunner, journal: Journal, transport: Transport, patience: Timeouts | None = None
    ) -> None:  # fmt: skip
        self.place, self.runner, self.journal = place, runner, journal
        self.patience = patience or Timeouts()
        self.talk = ExchangeProtocol(place, runner, transport, self.patience)
        self.watch = self.talk.watch
        self.leaving = False

    def leave(self) -> None:
        """Finish the step, commit, and go."""
        self.leaving = True
        self.talk.leave()

    async def live(self) -> None:
        """From the journal, or the beginning, through every round to a model of one's own; or until asked to leave."""
        await self.talk.start()
        try:
            done = await asyncio.to_thread(self.journal.restore, self.runner, self.place.newcomer)
            self.talk.now((max(done, 0) + 1, 0))
            await self._appear(done)
            await self._rounds(max(done, 0) + 1)
            if not self.leaving:
                await self._finish()
        finally:
            await self.talk.stop()

    async def _appear(self, done: int) -> None:
        """A new network starts together; one that comes back, or joins, finds out where the others are."""
        limit = (
            self.patience.start if done == 0 and not self.place.newcomer else self.patience.least
        )
        await self.talk.until(
            lambda: self.leaving or len(self.watch.living()) == len(self.watch.neighbours), limit
        )
        if self.runner.state is None and not self.leaving:
            await self._join()

    async def _rounds(self, t: int) -> None:
        while t <= self.place.rounds and not self.leaving:
            if self.watch.front() > t + 1 or (self.place.newcomer and self.watch.front() > t):
                log.info("going from round %d to the neighbours' round %d", t, self.watch.front())
                t = min(self.watch.front(), self.place.rounds)
            await self._round(t)
            t += 1

    async def _round(self, t: int) -> None:
        started, waited, exchanges = time.perf_counter(), 0.0, 0
        self.talk.now((t, 0))
        answers: dict[str, Answer] = {}
        header = await asyncio.to_thread(self.runner.start_round, t)
        while header is not None:
            before, asked = time.perf_counter(), self.runner.exchange
            answers = await self.talk.exchange((t, exchanges), asked)
            waited += time.perf_counter() - before
            exchanges += 1
            header = await asyncio.to_thread(
                self.runner.advance, self._neighbourhood(asked, answers)
            )
        missing = sorted(set(self.watch.neighbours) - set(answers)) if exchanges else []
        about = {
            "received": sorted(answers),
            "missing": missing,
            "seconds": {
                "total": round(time.perf_counter() - started, 6),
                "waiting": round(waited, 6),
            },
            "deadline": round(self.watch.deadline(), 3),
        }
        measured = t % self.place.evaluate_every == 0 or t == self.place.rounds
        await asyncio.to_thread(self.journal.commit, self.runner, t, about, measured)
        self.talk.now((t + 1, 0))
        without = f", without {', '.join(missing)}" if missing else ""
        log.info(
            "round %d of %d: heard %s%s",
            t,
            self.place.rounds,
            ", ".join(sorted(answers)) or "nobody",
            without,
        )

    def _neighbourhood(self, asked: Exchange, answers: dict[str, Answer]) -> Neighbourhood:
        return neighbourhood(
            self.place.client,
            asked,
            list(answers.values()),
            len(self.watch.neighbours),
            self.place.rule,
        )

    async def _finish(self) -> None:
        """Personalise, which needs nobody; then stay while somebody may still fetch the last round's models."""
        t = self.place.rounds + 1
        await asyncio.to_thread(self.journal.finish, self.runner, t)
        log.info("done: this node has a model of its own")
        await self.talk.greet()
        await self.talk.until(
            lambda: self.leaving or all(n.round >= t for n in self.watch.living()),
            self.patience.leave,
        )

    async def _join(self) -> None:
        """A newcomer's first models come from its neighbours; it takes part from the round that they are in."""
        clusters = await asyncio.to_thread(self._shared_clusters)
        answers = []
        for neighbour in self.watch.living() if clusters else ():
            if offer := await self.talk.fetch_shared(neighbour.name, clusters):
                said = Announcement(
                    0, JOINING, offer.clusters, (1.0,) * len(offer.clusters), (), 0, 0
                )
                answers.append(Answer(neighbour.client, said, offer))
        if clusters and not answers:
            raise NodeError(
                "No neighbour gave its models to this newcomer: start it again when one of them is up."
            )
        await asyncio.to_thread(self._settle, clusters, answers)

    def _shared_clusters(self) -> tuple[int, ...]:
        """What a node of this method gives to a newcomer; nothing, if its models are nobody else's."""
        plan = self.runner.plan
        cluster_CK, _ = plan.algorithm.share(
            plan.algorithm.begin(plan.learner, plan.train, plan.key)
        )
        return tuple(cluster_CK[0].tolist())

    def _settle(self, clusters: tuple[int, ...], answers: list[Answer]) -> None:
        plan, K = self.runner.plan, len(clusters)
        nothing, no_model = (
            torch.full((1, K), NO_CLUSTER),
            torch.zeros(1, K, plan.learner.size, dtype=plan.learner.dtype),
        )
        asked = Exchange(
            nothing, no_model, torch.zeros(1, K), torch.tensor([clusters], dtype=torch.long)
        )
        heard = neighbourhood(self.place.client, asked, answers, len(answers), "uniform")
        self.runner.join(heard, self.watch.front())
        log.info("joined with the models of %d neighbours", len(answers))
