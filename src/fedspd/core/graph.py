"""Who hears whom in one round.

Shapes: N clients, H pairs (a client, somebody it hears, itself included).
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
    """Closed neighbourhoods of N clients: whom each one hears, itself included, in ascending order. The order fixes the
    order of every sum.

    lists    offset and member: client i hears member[offset[i]:offset[i + 1]]; None: everyone hears everyone
    rule     how a mean weighs what it hears: all alike (Eq. 1), by Metropolis-Hastings, by the examples behind it, or so
             that a liar does little (robust.py)
    server   true for a star: everyone hears everyone, but through a server, which changes only what is sent
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
        pair = np.array(
            edges if isinstance(edges, np.ndarray) else list(edges), dtype=np.int64
        ).reshape(-1, 2)
        pair = pair[pair[:, 0] != pair[:, 1]]
        own = np.arange(n, dtype=np.int64)
        hearer = np.concatenate([own, pair[:, 0], pair[:, 1]])
        heard = np.concatenate([own, pair[:, 1], pair[:, 0]])
        entry = np.unique(hearer * n + heard)
        offset = np.searchsorted(entry, np.arange(n + 1, dtype=np.int64) * n)
        return cls(n, (offset.astype(np.int64), entry % n), rule, server)

    @classmethod
    def complete(cls, n: int, rule: LinkRule = "uniform", server: bool = False) -> "Graph":
        """Everyone hears everyone, without a list of N x N pairs."""
        return cls(n, None, rule, server)

    @property
    def is_complete(self) -> bool:
        return self.lists is None

    @property
    def offset(self) -> Ints:
        return (
            np.arange(self.clients + 1, dtype=np.int64) * self.clients
            if self.lists is None
            else self.lists[0]
        )

    @property
    def member(self) -> Ints:
        """Of a complete graph N x N numbers, made anew."""
        return (
            np.tile(np.arange(self.clients, dtype=np.int64), self.clients)
            if self.lists is None
            else self.lists[1]
        )

    @property
    def degree(self) -> Ints:
        """The number of neighbours of every client, itself not counted."""
        return np.diff(self.offset) - 1

    def closed(self, i: int) -> Ints:
        if self.lists is None:
            return np.arange(self.clients, dtype=np.int64)
        offset, member = self.lists
        return member[offset[i] : offset[i + 1]]

    def neighbours(self, i: int) -> Ints:
        return np.setdiff1d(self.closed(i), [i], assume_unique=True)

    def pairs(self, clients: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        """receiver_H, the place of each hearer among these clients, ascending, and heard_H, whom it hears, ascending too."""
        ids = np.asarray(clients, dtype=np.int64)
        count = self.degree[ids] + 1
        receiver_H = np.repeat(np.arange(len(ids)), count)
        first = self.offset[ids] - (np.cumsum(count) - count)
        place_H = np.arange(len(receiver_H)) + first[receiver_H]
        return receiver_H, place_H % self.clients if self.lists is None else self.lists[1][place_H]

    def edges(self) -> Ints:
        """Every edge once, as rows (i, j) with i < j."""
        hearer, heard = self.pairs(range(self.clients))
        once = hearer < heard
        return np.stack([hearer[once], heard[once]], axis=1)
