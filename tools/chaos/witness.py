"""A witness of peers in one process: it notes what they do, and what must never happen.

It asks no journal what was committed, and no peer what it received: it notes both itself, as they
happen. So a peer that loses, changes or repeats a round contradicts the witness.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection
from copy import copy
from typing import Any

from torch import Tensor

from chaos.insiders import InsiderTransport
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.ledger import NO_CLUSTER
from fedspd.node.peer.answers import Answer
from fedspd.node.peer.inbox import ExchangeId
from fedspd.node.peer.peer import Peer
from fedspd.node.wire.messages import Offer, Request
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json

Commit = tuple[int, str]  # a round, and the hash of the state after it


class Witness:
    """The rounds that each peer has committed, what it has offered, and the problems found."""

    def __init__(self, links: dict[str, Collection[str]], liars: Collection[str]) -> None:
        self.links, self.liars = links, liars
        self.committed: defaultdict[str, list[Commit]] = defaultdict(list)
        self.problems: list[str] = []
        self.is_split = False  # a node may have lost all honest neighbours, and follow a liar
        self._latest = 0  # round that an honest node has committed
        self._begun: dict[str, Commit] = {}  # that may be on the disk, or not
        self._started: dict[str, int] = {}  # the round that a process works on
        self._offered: defaultdict[tuple[str, int, int], set[str]] = defaultdict(set)

    def watch(self, peer: Peer) -> None:
        """Note all that a new process of a peer does."""
        self._started.pop(peer.context.name, None)
        self._watch_exchanges(peer)
        self._watch_means(peer)
        self._watch_commits(peer)
        self._watch_restore(peer)

    def forget(self, name: str, after: int) -> None:
        """Note that an operator rolled a node back."""
        self.committed[name] = [one for one in self.committed[name] if one[0] <= after]
        self._begun.pop(name, None)

    def check_journal(self, name: str, events: list[Commit]) -> None:
        """Compare the events of a journal with what was committed; one more may have begun."""
        known, begun = self.committed[name], self._begun.get(name)
        if events != known and events != [*known, begun]:
            self.problems.append(f"the journal of {name} has {events}; committed were {known}")

    # ---- what a peer does

    def _watch_exchanges(self, peer: Peer) -> None:
        name, run_exchange = peer.context.name, peer.protocol.run_exchange

        async def check(exchange_id: ExchangeId, exchange: Exchange) -> dict[str, Answer]:
            self._check_start(name, exchange_id.round)
            key = name, *exchange_id
            self._offered[key].add(_digest(exchange.model_CKP[0]))
            return await run_exchange(exchange_id, exchange)

        peer.protocol.run_exchange = check  # type: ignore[method-assign]
        transport = peer.protocol.transport
        if isinstance(transport, InsiderTransport):
            transport.lie, tell = copy(transport.lie), transport.lie.offer

            def note(network: Any, to: str, request: Request, truth: Offer) -> Offer:
                said = tell(network, to, request, truth)
                key = name, request.round, request.exchange
                self._offered[key].add(_digest(said.model_KP))
                return said

            object.__setattr__(transport.lie, "offer", note)  # a lie may be frozen

    def _check_start(self, name: str, round: int) -> None:
        """A round follows a committed one, or skips to one that honest nodes have reached."""
        done = self.committed[name][-1][0] if self.committed[name] else 0
        before = self._started.get(name, done)
        if before not in (done, round):
            self.problems.append(f"{name} starts round {round}, and never committed {before}")
        if round <= done:
            self.problems.append(f"{name} repeats round {round}, and has committed {done}")
        if round > self._latest + 1 and not self.is_split and name not in self.liars:
            self.problems.append(f"{name} skips to round {round}; no honest node is there")
        self._started[name] = round

    def _watch_means(self, peer: Peer) -> None:
        name, build = peer.context.name, peer._build_neighbourhood

        def check(exchange: Exchange, answers: dict[str, Answer]) -> Neighbourhood:
            for sender, answer in answers.items():
                self._check_answer(name, peer.protocol.current, sender, answer)
            found = build(exchange, answers)
            sent = [_offered(exchange)[0], *(each.offer.model_KP for each in answers.values())]
            known = {_digest(each.to(exchange.model_CKP)) for each in sent}
            counted = {_digest(model_KP) for model_KP in _offered(found.offers) if len(model_KP)}
            if not counted <= known:
                self.problems.append(f"{name} averages what nobody sent")
            return found

        peer._build_neighbourhood = check  # type: ignore[method-assign]

    def _check_answer(self, name: str, current: ExchangeId, sender: str, answer: Answer) -> None:
        said = ExchangeId(answer.announcement.round, answer.announcement.exchange)
        if sender not in self.links[name]:
            self.problems.append(f"{name} averages a model of {sender}, an outsider")
        if said != current:
            self.problems.append(f"{name} averages round {said.round} of {sender} in {current}")
        known = self._offered[(sender, *current)]
        if len(answer.offer.clusters) and _digest(answer.offer.model_KP) not in known:
            self.problems.append(f"{name} averages what {sender} never offered in {current}")

    # ---- its journal

    def _watch_commits(self, peer: Peer) -> None:
        name, journal = peer.context.name, peer.journal
        write = journal._write

        def check(runner: BlockRunner, round: int, event: Json, measure: bool) -> None:
            known = self.committed[name]
            if known and round <= known[-1][0]:
                self.problems.append(f"{name} goes back from round {known[-1][0]} to {round}")
            self._begun[name] = round, runner.digests()[0]
            write(runner, round, event, measure)
            known.append(self._begun.pop(name))
            if name not in self.liars:
                self._latest = max(self._latest, round)

        journal._write = check  # type: ignore[method-assign]

    def _watch_restore(self, peer: Peer) -> None:
        name, journal = peer.context.name, peer.journal
        restore = journal.restore

        def check(runner: BlockRunner, is_newcomer: bool) -> int:
            done = restore(runner, is_newcomer)
            found = done, runner.digests()[0]
            begun = self._begun.pop(name, None)
            if begun is not None and found == begun:
                self.committed[name].append(begun)
            known = self.committed[name]
            if (known or done) and [found] != known[-1:]:
                self.problems.append(f"{name} restores {found}; committed were {known}")
            return done

        journal.restore = check  # type: ignore[method-assign]


def _offered(exchange: Exchange) -> list[Tensor]:
    """Return the models of each sender that are of a cluster; the others count in no mean."""
    rows = zip(exchange.model_CKP, exchange.cluster_CK, strict=True)
    return [model_KP[cluster_K != NO_CLUSTER] for model_KP, cluster_K in rows]


def _digest(model_KP: Tensor) -> str:
    return hashlib.sha256(model_KP.contiguous().numpy().tobytes()).hexdigest()
