"""Edges as numbers: the pairs i < j of N clients, counted row by row from 0.

A set of edges is then a sorted array, its complement needs no memory, and work stays in the number of edges, never N x N.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

Ints: TypeAlias = NDArray[np.int64]


def pair_count(n: int) -> int:
    return n * (n - 1) // 2


def _row_start(n: int) -> Ints:
    row = np.arange(n, dtype=np.int64)
    return row * (2 * n - row - 1) // 2


def encode(n: int, i: Ints, j: Ints) -> Ints:
    """The sorted, distinct numbers of the edges between i and j, in either order."""
    low, high = np.minimum(i, j), np.maximum(i, j)
    return np.unique(_row_start(n)[low] + high - low - 1)


def decode(n: int, number: Ints) -> tuple[Ints, Ints]:
    start = _row_start(n)
    i = np.searchsorted(start[:-1], number, side="right") - 1
    return i, number - start[i] + i + 1


def absent(present: Ints, rank: Ints) -> Ints:
    """The numbers that rank 0, 1, 2, ... among those that the sorted array does not hold."""
    return rank + np.searchsorted(present - np.arange(len(present)), rank, side="right")


def components(n: int, number: Ints) -> tuple[int, Ints]:
    """How many components there are, and the component of every client."""
    i, j = decode(n, number)
    count, label = connected_components(
        coo_array((np.ones(len(i)), (i, j)), shape=(n, n)), directed=False
    )
    return int(count), label.astype(np.int64)


def joining(n: int, number: Ints, rng: np.random.Generator) -> Ints:
    """Random edges, as few as possible, that join the components into one."""
    count, label = components(n, number)
    place = rng.permutation(count)[label]
    client = np.argsort(place, kind="stable")
    end = np.cumsum(np.bincount(place))
    earlier = client[rng.integers(0, end[:-1])]
    own = client[rng.integers(end[:-1], end[1:])]
    return encode(n, earlier, own)


def connected_choice(n: int, preferred: Ints, count: int) -> Ints:
    """`count` of the edges, best first, that keep all clients connected: the best spanning tree and the best of the rest.

    Against the first `count` edges this swaps the worst edges that are no bridges for the best that join components.
    """
    i, j = decode(n, preferred)
    rank = np.arange(1, len(preferred) + 1, dtype=np.float64)
    tree = minimum_spanning_tree(coo_array((rank, (i, j)), shape=(n, n)).tocsr())
    in_tree = np.zeros(len(preferred), dtype=bool)
    in_tree[tree.data.astype(np.int64) - 1] = True
    rest = preferred[~in_tree][: max(0, count - (n - 1))]
    return np.sort(np.concatenate([preferred[in_tree], rest]))
