"""Edges as numbers: the pairs i < j of N clients, numbered row by row from 0.

So a set of edges is a sorted array, its complement needs no memory, and the work is in proportion
to the number of edges, never to N x N.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

Ints: TypeAlias = NDArray[np.int64]


def pair_count(n: int) -> int:
    """Return the number of pairs of n clients."""
    return n * (n - 1) // 2


def _row_start(n: int) -> Ints:
    row = np.arange(n, dtype=np.int64)
    return row * (2 * n - row - 1) // 2


def encode(n: int, i: Ints, j: Ints) -> Ints:
    """Return the sorted, distinct numbers of the edges between i and j, in either order."""
    low, high = np.minimum(i, j), np.maximum(i, j)
    return np.unique(_row_start(n)[low] + high - low - 1)


def decode(n: int, number: Ints) -> tuple[Ints, Ints]:
    """Return the clients i < j of each edge."""
    start = _row_start(n)
    i = np.searchsorted(start[:-1], number, side="right") - 1
    return i, number - start[i] + i + 1


def absent(present: Ints, rank: Ints) -> Ints:
    """Return the numbers of these ranks among all numbers that the sorted array does not have."""
    return rank + np.searchsorted(present - np.arange(len(present)), rank, side="right")


def components(n: int, number: Ints) -> tuple[int, Ints]:
    """Return the number of components, and the component of every client."""
    i, j = decode(n, number)
    adjacency = coo_array((np.ones(len(i)), (i, j)), shape=(n, n))
    count, label = connected_components(adjacency, directed=False)
    return int(count), label.astype(np.int64)


def connecting_edges(n: int, number: Ints, rng: np.random.Generator) -> Ints:
    """Return random edges, as few as possible, that connect the components."""
    count, label = components(n, number)
    rank = rng.permutation(count)[label]
    client = np.argsort(rank, kind="stable")
    end = np.cumsum(np.bincount(rank))
    earlier = client[rng.integers(0, end[:-1])]
    own = client[rng.integers(end[:-1], end[1:])]
    return encode(n, earlier, own)


def choose_connected(n: int, preferred: Ints, count: int) -> Ints:
    """Return `count` of the edges, given best first, that connect all clients.

    These are the best spanning tree and the best of the rest. Compared with the first `count`
    edges, the worst edges that are not bridges are replaced by the best that connect components.
    """
    i, j = decode(n, preferred)
    rank = np.arange(1, len(preferred) + 1, dtype=np.float64)
    tree = minimum_spanning_tree(coo_array((rank, (i, j)), shape=(n, n)).tocsr())
    in_tree = np.zeros(len(preferred), dtype=bool)
    in_tree[tree.data.astype(np.int64) - 1] = True
    rest = preferred[~in_tree][: max(0, count - (n - 1))]
    return np.sort(np.concatenate([preferred[in_tree], rest]))
