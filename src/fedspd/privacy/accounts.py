"""What each client has released of its examples, and whether its budget lets it send more.

A client that would exceed its budget is silent from then on: it sends nothing more, and goes on
listening and training.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedspd.core.mechanism import Release
from fedspd.privacy.accountant import epsilon


class Limit(NamedTuple):
    """The epsilon at delta that no client may exceed.

    How many releases a client makes may follow from what its neighbours send. So what counts is one
    order of the divergence, chosen beforehand: a sum at the order that is best afterwards promises
    nothing then (Feldman & Zrnic; NeurIPS 2021). Without sampling there is no order to choose
    (Smith & Thakurta; 2022).

    order   the best one for the planned releases; None: none of them is sampled
    """

    epsilon: float
    delta: float
    order: float | None = None

    def permits(self, releases: Sequence[Release]) -> bool:
        """Return whether a client may send all of these."""
        return epsilon(releases, self.delta, self.order) <= self.epsilon


class Accounts:
    """The accounts of simulated clients, in memory; a node has its own, in its journal.

    spent    every client's releases, in their order
    silent   how many of them were made before the client's budget was spent, by silent client
    """

    def __init__(self, limit: Limit | None) -> None:
        self.limit = limit
        self.spent: dict[int, list[Release]] = defaultdict(list)
        self.silent: dict[int, int] = {}

    def restore(self, spent: Sequence[Sequence[Release]], silent: Mapping[int, int]) -> None:
        """Take the accounts of all clients from the ledger of a run."""
        self.spent = defaultdict(list, {client: list(own) for client, own in enumerate(spent)})
        self.silent = dict(silent)

    def pay(self, client: int, releases: Sequence[Release]) -> None:
        """Add what a client is about to send of its examples, or is not, if it becomes silent."""
        own, before = self.spent[client], len(self.spent[client])
        own.extend(releases)
        if not releases or self.limit is None or client in self.silent:
            return
        if not self.limit.permits(own):
            self.silent[client] = before

    def is_silent(self, client: int) -> bool:
        """Return whether a client may send nothing more."""
        return client in self.silent
