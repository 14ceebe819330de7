"""The mixing matrix of a graph: one exchange turns models c_j into c_i = sum over j of W_ij c_j.

Shapes: N clients, L links, each from a sender to a receiver; a client has a link to itself.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from fedspd.core.graph import Graph
from fedspd.core.links import link_weights

Matrix: TypeAlias = "csr_array[np.float64, tuple[int, int]]"


def graph_mixing_matrix(
    graph: Graph, active: NDArray[np.bool_] | None = None, examples: NDArray[np.int64] | None = None
) -> Matrix:
    """Return W of Eq. 1 for the clients that chose a cluster; the others keep their models.

    By default all clients are active and have the same number of examples.
    """
    n = graph.clients
    active_N = np.ones(n, dtype=bool) if active is None else active
    examples_N = np.ones(n) if examples is None else examples.astype(np.float64)
    receiver_L, sender_L = graph.pairs(range(n))
    is_link_L = (active_N[receiver_L] & active_N[sender_L]) | (receiver_L == sender_L)
    receiver_L, sender_L = receiver_L[is_link_L], sender_L[is_link_L]
    degree_N = graph.degree
    weight_L = link_weights(
        graph.rule,
        row_L=receiver_L,
        is_own_L=receiver_L == sender_L,
        examples_L=examples_N[sender_L],
        degree_L=np.maximum(degree_N[receiver_L], degree_N[sender_L]),
    )
    return csr_array((weight_L, (receiver_L, sender_L)), shape=(n, n))
