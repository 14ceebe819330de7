"""The communication graph of one round: who receives from whom.

Shapes: N clients, H pairs of a receiver and one of its senders, itself included.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LinkRule = Literal["uniform", "metropolis", "examples", "median", "trimmed", "clipped"]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Graph:
    """Closed neighbourhoods of N clients, each in ascending order, which fixes the order of sums.

    lists    offset and member: client i receives from member[offset[i]:offset[i + 1]], itself
             included; None: all clients receive from all
    rule     the aggregation rule: equal weights (Eq. 1), Metropolis-Hastings weights, weights by
             the number of examples, or a robust mean (robust.py)
    server   whether it is a star: all clients receive from all, but through a server, which
             changes only what is sent
    """

    clients: int
    lists: tuple[Ints, Ints] | None
    rule: LinkRule = "uniform"
    server: bool = False

    @classmethod
    def from_edges(
        cls,
        n: int,
        edges: Iterable[tuple[int, int]] | NDArray[np.int64],
        rule: LinkRule = "uniform",
        server: bool = False,
    ) -> "Graph":
        """Return the graph with these undirected edges; loops and repetitions do not count."""
        rows = edges if isinstance(edges, np.ndarray) else list(edges)
        pair = np.array(rows, dtype=np.int64).reshape(-1, 2)
        pair = pair[pair[:, 0] != pair[:, 1]]
        own = np.arange(n, dtype=np.int64)
        receiver = np.concatenate([own, pair[:, 0], pair[:, 1]])
        sender = np.concatenate([own, pair[:, 1], pair[:, 0]])
        entry = np.unique(receiver * n + sender)
        offset = np.searchsorted(entry, np.arange(n + 1, dtype=np.int64) * n)
        return cls(n, (offset.astype(np.int64), entry % n), rule, server)

    @classmethod
    def complete(cls, n: int, rule: LinkRule = "uniform", server: bool = False) -> "Graph":
        """Return the complete graph without a list of N x N pairs."""
        return cls(n, None, rule, server)

    @property
    def is_complete(self) -> bool:
        """Whether the graph was made as a complete one, without lists."""
        return self.lists is None

    @property
    def offset(self) -> Ints:
        """The start of each client's senders in `member`, and the end of the last one's."""
        if self.lists is not None:
            return self.lists[0]
        return np.arange(self.clients + 1, dtype=np.int64) * self.clients

    @property
    def member(self) -> Ints:
        """The senders of all clients, one client after the other; N x N of a complete graph."""
        if self.lists is not None:
            return self.lists[1]
        return np.tile(np.arange(self.clients, dtype=np.int64), self.clients)

    @property
    def degree(self) -> Ints:
        """The number of neighbours of every client, itself not counted."""
        return np.diff(self.offset) - 1

    def closed(self, i: int) -> Ints:
        """Return client i and its neighbours, ascending."""
        if self.lists is None:
            return np.arange(self.clients, dtype=np.int64)
        offset, member = self.lists
        return member[offset[i] : offset[i + 1]]

    def neighbours(self, i: int) -> Ints:
        """Return the neighbours of client i, ascending."""
        closed = self.closed(i)
        others: Ints = closed[closed != i]
        return others

    def pairs(self, clients: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        """Return receiver_H and sender_H, ascending by receiver, then by sender.

        A receiver is a row in `clients`, a sender is a client's id.
        """
        ids = np.asarray(clients, dtype=np.int64)
        count = self.degree[ids] + 1
        receiver_H = np.repeat(np.arange(len(ids)), count)
        first = self.offset[ids] - (np.cumsum(count) - count)
        index_H = np.arange(len(receiver_H)) + first[receiver_H]
        return receiver_H, index_H % self.clients if self.lists is None else self.lists[1][index_H]

    def edges(self) -> Ints:
        """Return every edge once, as rows (i, j) with i < j."""
        receiver, sender = self.pairs(range(self.clients))
        is_first = receiver < sender
        return np.stack([receiver[is_first], sender[is_first]], axis=1)
