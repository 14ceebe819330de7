"""The weights of links: the entries of the mixing matrix W, as averaging and diagnostics use it.

Shapes: L links, each from a sender to a receiver; a client has a link to itself.
"""

import numpy as np
from numpy.typing import NDArray

from fedspd.core.graph import LinkRule


def link_weights(
    rule: LinkRule,
    row_L: NDArray[np.int64],
    is_own_L: NDArray[np.bool_],
    examples_L: NDArray[np.float64],
    degree_L: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return the weight of each link in its row of W; every row sums to 1.

    examples_L is the number of examples behind the sent model, degree_L the larger degree of the
    two clients in the whole graph.

    uniform      all links of a row have the same weight
    examples     in proportion to the examples; the same weight where no link has any
    metropolis   1 / (1 + the larger degree) for a neighbour, the rest for the client itself
    others       as uniform: no matrix expresses a robust mean
    """
    weight_L: NDArray[np.float64] = np.ones(len(row_L))
    if rule == "examples":
        has_examples_L = np.bincount(row_L, examples_L)[row_L] > 0
        weight_L = np.where(has_examples_L, examples_L, 1.0)
    if rule == "metropolis":
        weight_L = 1.0 / (1.0 + degree_L.astype(np.float64))
        others = ~is_own_L
        rows = row_L.max(initial=0) + 1
        received = np.bincount(row_L[others], weight_L[others], minlength=rows)
        weight_L = np.where(is_own_L, 1.0 - received[row_L], weight_L)
    return weight_L / np.bincount(row_L, weight_L)[row_L]
