"""An engine that tells every client as little as it may, and checks every exchange.

Shapes: C clients in a block, N clients, K models offered by each, M clusters wanted, P parameters.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedspd.core.errors import MethodError
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.ledger import NO_CLUSTER, SERVER
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.measures import Measures
from fedspd.runtime.plan import Plan
from fedspd.testing.subject import select_clients

Transfer = tuple[int, int, int]  # sender, receiver, cluster


class StrictEngine:
    """Blocks of any clients in any order; by default, every client is a block of its own.

    A block receives only from its neighbours, and only the clusters that it wants. Everything else
    is NaN or missing, so that a method that uses more ends in another state than elsewhere.
    """

    def __init__(self, plan: Plan, blocks: Sequence[Sequence[int]] | None = None) -> None:
        self.plan = plan
        clients = [[i] for i in range(plan.clients)] if blocks is None else blocks
        self.runners = [BlockRunner(select_clients(plan, block)) for block in clients]

    def begin(self) -> None:
        """Take the states before round 1."""
        for runner in self.runners:
            runner.begin()

    def round(self, t: int, graph: Graph) -> list[list[Transfer]]:
        """Run one round; return the transfers of every exchange."""
        sent = []
        announced = [runner.start_round(t) for runner in self.runners]
        while any(one is not None for one in announced):
            Announcements.merge(announced)  # refuses blocks that differ
            offers = self._offers()
            check_offers(self.plan, offers)
            sent.append(transfers(graph, offers))
            answers = [receive(graph, r.plan.train.clients, offers) for r in self.runners]
            announced = [r.advance(own) for r, own in zip(self.runners, answers, strict=True)]
        return sent

    def _offers(self) -> Exchange:
        """Return what all clients offer, in the order of their ids."""
        exchanges = [runner.exchange for runner in self.runners]
        order = torch.tensor([i for r in self.runners for i in r.plan.train.clients]).argsort()

        def table(name: str) -> torch.Tensor:
            return torch.cat([getattr(exchange, name) for exchange in exchanges])[order]

        first = exchanges[0]
        return Exchange(
            table("cluster_CK"),
            table("model_CKP"),
            table("weight_CK"),
            table("want_CM"),
            None if first.note_C is None else table("note_C"),
            first.is_model,
        )

    def finish(self, t: int) -> None:
        """Take the states after the final phase."""
        for runner in self.runners:
            runner.finish(t)

    def measure(self) -> Measures:
        """Return the measurements, block by block."""
        return Measures.merge([runner.measure() for runner in self.runners])

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        for runner in self.runners:
            runner.save(folder)

    def load(self, folder: Path) -> None:
        """Load a checkpoint."""
        for runner in self.runners:
            runner.load(folder)

    def digests(self) -> list[str]:
        """Return the hash of every client's state, in the order of their ids."""
        found: dict[int, str] = {}
        for runner in self.runners:
            found |= dict(zip(runner.plan.train.clients, runner.digests(), strict=True))
        return [found[i] for i in sorted(found)]

    def close(self) -> None:
        """Do nothing: there are no other processes."""


def check_offers(plan: Plan, offers: Exchange) -> None:
    """Raise MethodError for an exchange that the wire of real peers would refuse."""
    S, learner = max(1, plan.algorithm.offer_limit), plan.learner
    limit = plan.algorithm.size_limit(learner)

    def require(condition: bool, sentence: str) -> None:
        if not condition:
            raise MethodError(f"{type(plan.algorithm).__name__}.round: {sentence}")

    for name in ("cluster_CK", "want_CM"):
        rows = getattr(offers, name).tolist()
        require(len(rows[0]) <= S, f"{name} has {len(rows[0])} columns; expected at most S = {S}.")
        for row in rows:
            named = [cluster for cluster in row if cluster != NO_CLUSTER]
            is_known = all(isinstance(s, int) and 0 <= s < S for s in named)
            require(is_known, f"{name} has the row {row}; expected clusters from 0 to {S - 1}.")
            require(len(set(named)) == len(named), f"{name} has the row {row}; expected no repeat.")
    dtype, size = offers.model_CKP.dtype, offers.model_CKP.shape[2]
    require(dtype == learner.dtype, f"model_CKP is {dtype}; expected {learner.dtype}.")
    require(size <= limit, f"P = {size}; expected at most {limit}.")
    weight_CK = offers.weight_CK.double()
    is_weight = bool((weight_CK.isfinite() & (weight_CK >= 0)).all())
    require(is_weight, "weight_CK has a value that is not finite or below 0.")


def receive(graph: Graph, clients: Sequence[int], offers: Exchange) -> Neighbourhood:
    """Return what a block receives; a model that it does not want is NaN."""
    senders = np.unique(np.concatenate([graph.closed(i) for i in clients]))
    is_wanted = torch.isin(offers.cluster_CK[senders], offers.want_CM[list(clients)])
    is_own = torch.from_numpy(np.isin(senders, clients))[:, None]
    model_NKP = torch.where((is_wanted | is_own)[:, :, None], offers.model_CKP[senders], torch.nan)
    received = replace(
        offers,
        cluster_CK=offers.cluster_CK[senders],
        model_CKP=model_NKP,
        weight_CK=offers.weight_CK[senders],
        want_CM=offers.want_CM[senders],
        note_C=None if offers.note_C is None else offers.note_C[senders],
    )
    return Neighbourhood.of(graph, clients, received, senders)


def transfers(graph: Graph, offers: Exchange) -> list[Transfer]:
    """Return what is sent, counted one by one from the definition.

    A model goes to each neighbour that wants its cluster; on a star it goes up, and its mean down.
    """
    offered, wants = offers.cluster_CK.tolist(), offers.want_CM.tolist()
    if graph.server:
        up = [(i, SERVER, s) for i, row in enumerate(offered) for s in row if s != NO_CLUSTER]
        made = {s for _, _, s in up}
        return up + [(SERVER, i, s) for i, row in enumerate(wants) for s in row if s in made]
    return [
        (i, int(j), s)
        for i, row in enumerate(offered)
        for j in graph.neighbours(i)
        for s in row
        if s != NO_CLUSTER and s in wants[j]
    ]
