"""Who hears whom in one round."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LinkRule = Literal["uniform", "metropolis", "examples"]


@dataclass(frozen=True)
class Graph:
    """Closed neighbourhoods of N clients, one after the other: client i hears member[offset[i]:offset[i + 1]],
    itself included, in ascending order. The order fixes the order of every sum.

    rule     how a mean weighs what it hears: all alike (Eq. 1), by Metropolis-Hastings, or by the examples behind it
    server   true for a star: everyone hears everyone, but through a server, which changes only what is sent
    """

    offset: NDArray[np.int64]
    member: NDArray[np.int64]
    rule: LinkRule = "uniform"
    server: bool = False

    @classmethod
    def from_edges(cls, n: int, edges: Iterable[tuple[int, int]], rule: LinkRule = "uniform", server: bool = False) -> "Graph":
        pair = np.array([(i, j) for i, j in edges if i != j], dtype=np.int64).reshape(-1, 2)
        own = np.arange(n, dtype=np.int64)
        hearer = np.concatenate([own, pair[:, 0], pair[:, 1]])
        heard = np.concatenate([own, pair[:, 1], pair[:, 0]])
        entry = np.unique(hearer * n + heard)
        offset = np.searchsorted(entry, np.arange(n + 1, dtype=np.int64) * n)
        return cls(offset.astype(np.int64), entry % n, rule, server)

    @property
    def clients(self) -> int:
        return len(self.offset) - 1

    @property
    def degree(self) -> NDArray[np.int64]:
        """The number of neighbours of every client, itself not counted."""
        return np.diff(self.offset) - 1

    def closed(self, i: int) -> NDArray[np.int64]:
        return self.member[self.offset[i] : self.offset[i + 1]]

    def neighbours(self, i: int) -> NDArray[np.int64]:
        return np.setdiff1d(self.closed(i), [i], assume_unique=True)

    def edges(self) -> NDArray[np.int64]:
        """Every edge once, as rows (i, j) with i < j."""
        hearer = np.repeat(np.arange(self.clients), np.diff(self.offset))
        once = hearer < self.member
        return np.stack([hearer[once], self.member[once]], axis=1)
