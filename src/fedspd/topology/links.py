"""The matrix of link weights that one exchange applies: new c_i = sum over j of W_ij c_j.

Shapes: N clients, M pairs (hearer, heard), every client with itself included.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from fedspd.core.graph import Graph

Matrix: TypeAlias = "csr_array[np.float64, tuple[int, int]]"


def link_matrix(
    graph: Graph, active: NDArray[np.bool_] | None = None, counts: NDArray[np.int64] | None = None
) -> Matrix:
    """W of Eq. 1 for the clients that chose the cluster (`active`; all, if not given). Any other client keeps what it has.

    uniform      1 / (number of active clients in the closed neighbourhood)
    examples     the same, weighted by `counts`, the examples of every client (all alike, if not given)
    metropolis   1 / (1 + the larger degree in the whole graph) to every active neighbour, the rest to oneself
    others       as uniform: a robust mean is no matrix
    """
    n = graph.clients
    hearer_M, heard_M = graph.pairs(range(n))
    own_M = hearer_M == heard_M
    active_N = np.ones(n, dtype=bool) if active is None else active
    linked_M = active_N[hearer_M] & active_N[heard_M] & ~own_M
    if graph.rule == "metropolis":
        weight_M = linked_M / (1 + np.maximum(graph.degree[hearer_M], graph.degree[heard_M]))
        weight_M[own_M] = 1 - np.bincount(hearer_M, weight_M)
    else:
        count_N = counts if graph.rule == "examples" and counts is not None else np.ones(n)
        weight_M = (linked_M | own_M) * count_N[heard_M]
        weight_M = weight_M / np.bincount(hearer_M, weight_M)[hearer_M]
    held_M = linked_M | own_M
    return csr_array((weight_M[held_M], (hearer_M[held_M], heard_M[held_M])), shape=(n, n))
