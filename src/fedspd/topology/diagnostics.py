"""How connected a graph is, and how fast it brings the clients together.

Shapes: N clients.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array
from scipy.sparse.csgraph import connected_components, dijkstra

from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.robust import ROBUST
from fedspd.topology.build import Topology
from fedspd.topology.mixing import Matrix, graph_mixing_matrix

Floats: TypeAlias = NDArray[np.float64]
Apply: TypeAlias = Callable[[Floats], Floats]

EXACT_DIAMETER = 2_000  # clients up to which every pair is looked at
DENSE = 500  # clients up to which eigenvalues come from a dense matrix


def describe(topology: Topology, key: Key, clusters: int = 2) -> dict[str, Any]:
    """What the first round's graph is like. The key only starts the search for eigenvalues."""
    graph = topology.at(1)
    degree_N = graph.degree
    hops, exact = diameter(graph)
    rate = consensus_rate(graph, clusters, key.of("consensus rate"))
    return {
        "kind": topology.kind,
        "weights": graph.rule,
        "clients": graph.clients,
        "edges": int(degree_N.sum()) // 2,
        "degree_min": int(degree_N.min()),
        "degree_mean": float(degree_N.mean()),
        "degree_max": int(degree_N.max()),
        "connected": graph.is_complete
        or bool(connected_components(_adjacency(graph), directed=False)[0] == 1),
        "diameter": hops,
        "diameter_exact": exact,
        "spectral_gap": spectral_gap(graph, key.of("spectral gap")),
        "clusters": clusters,
        "consensus_rate": rate,
        "notes": _notes(topology, graph, exact, rate),
    }


def _notes(topology: Topology, graph: Graph, exact: bool, rate: float) -> list[str]:
    options, mean = topology.options, float(graph.degree.mean())
    asked = options.expected_degree(graph.clients)
    notes = [
        (
            topology.kind == "ba" and abs(mean - asked) > 0.005,
            f"the average degree is {mean:.3g}, where {asked:g} was asked",
        ),
        (not exact, f"the diameter is at least this: it is exact up to {EXACT_DIAMETER} clients"),
        (
            options.remove > 0,
            f"this is round 1; each later round removes an edge with probability {options.remove:g}",
        ),
        (graph.rule == "examples", "every client counts alike here, as its examples are not known"),
        (
            graph.rule in ROBUST,
            f"{graph.rule} is no matrix: spectral gap and p are those of uniform weights",
        ),
        (
            rate <= 0,
            "p <= 0: these weights do not keep the mean, and one exchange may take clients apart; metropolis keeps it",
        ),
    ]
    return [note for holds, note in notes if holds]


def diameter(graph: Graph) -> tuple[int, bool]:
    """The most hops between two clients of a connected graph, and true; for many clients a lower bound by two sweeps, and false."""
    if graph.is_complete:
        return min(1, graph.clients - 1), True
    if graph.clients <= EXACT_DIAMETER:
        return max(_hops_to_all(graph, first) for first in range(0, graph.clients, 64)), True
    adjacency = _adjacency(graph)
    far = int(np.argmax(dijkstra(adjacency, indices=[0], unweighted=True)))
    return int(dijkstra(adjacency, indices=[far], unweighted=True).max()), False


def _hops_to_all(graph: Graph, first: int) -> int:
    """The hops after which nobody hears any more news from the 64 clients that follow `first`, a bit for each."""
    source = np.arange(first, min(first + 64, graph.clients))
    heard_N = np.zeros(graph.clients, dtype=np.uint64)
    heard_N[source] = np.uint64(1) << (source - first).astype(np.uint64)
    hops = 0
    while True:
        news_N = np.bitwise_or.reduceat(heard_N[graph.member], graph.offset[:-1])
        if np.array_equal(news_N, heard_N):
            return hops
        heard_N, hops = news_N, hops + 1


def spectral_gap(graph: Graph, key: Key) -> float:
    """1 - the second largest modulus of an eigenvalue of W, when all clients are active and have as many examples.

    Uniform weights are D^-1 (A + I), which has the eigenvalues of the symmetric D^-1/2 (A + I) D^-1/2.
    """
    if graph.is_complete:
        return 1.0  # one exchange, and all agree
    scale_N = np.ones(graph.clients) if graph.rule == "metropolis" else np.sqrt(graph.degree + 1.0)
    symmetric = diags_array(scale_N) @ graph_mixing_matrix(graph) @ diags_array(1 / scale_N)
    return 1 - _largest_eigenvalue(lambda x_N: symmetric @ x_N, scale_N, key)


def consensus_rate(graph: Graph, clusters: int, key: Key) -> float:
    """p of Assumption 7 with beta = 1: the largest p with E||W C - mean||^2 <= (1 - p) ||C - mean||^2 for every C.

    C has a row per client, `mean` is the mean of C's rows, and each client chose this cluster with probability 1 / clusters,
    independently. As W keeps what all agree on, 1 - p is the largest eigenvalue of E[W^T W] among the directions that
    sum to 0. The expectation is exact, not sampled. Nothing is clipped: p is at most 1, and with weights that are not
    doubly stochastic it may be 0 or below.
    """
    chosen = 1 / clusters
    expected = (
        _expected_metropolis(graph, chosen)
        if graph.rule == "metropolis"
        else _expected_uniform(graph, chosen)
    )
    return 1 - _largest_eigenvalue(expected, np.ones(graph.clients), key)


def _expected_metropolis(graph: Graph, chosen: float) -> Apply:
    """x -> E[W^T W] x.

    W = I - sum of the active edges' Laplacians w_e L_e. An edge is active with probability q^2, two edges that share a
    client with q^3, and the product L_e L_f of two that share none is 0. So with L = sum of w_e L_e:
    E[W W] = I - 2 q^2 L + q^3 L L + 2 (q^2 - q^3) sum of w_e^2 L_e, as L_e L_e = 2 L_e.
    """
    weights, squares = _metropolis_sums(graph)
    ones_N = np.ones(graph.clients)
    weight_N, square_N = weights(ones_N), squares(ones_N)
    edge, edges = chosen**2, chosen**3

    def apply(x_N: Floats) -> Floats:
        once_N = weight_N * x_N - weights(x_N)
        twice_N = weight_N * once_N - weights(once_N)
        square_x_N = square_N * x_N - squares(x_N)
        return np.asarray(
            x_N - 2 * edge * once_N + edges * twice_N + 2 * (edge - edges) * square_x_N
        )

    return apply


def _metropolis_sums(graph: Graph) -> tuple[Apply, Apply]:
    """x -> the sum over a client's neighbours of w_e x, and of w_e^2 x."""
    if graph.is_complete:
        around, n = _around(graph), graph.clients
        return lambda x_N: around(x_N) / n, lambda x_N: around(x_N) / n**2
    weights = graph_mixing_matrix(graph)
    weights.setdiag(0)
    squares = weights.power(2)
    return lambda x_N: np.asarray(weights @ x_N), lambda x_N: np.asarray(squares @ x_N)


def _expected_uniform(graph: Graph, chosen: float) -> Apply:
    """x -> E[W^T W] x = sum over i of E[w_i w_i^T] x, where w_i is row i of W.

    With k active neighbours, an active client's row is 1 / (1 + k) at itself and at those. The expected product of two of its
    entries is `own` for itself twice, `one` if one neighbour must be active, `two` if two must.
    """
    own_N, one_N, two_N = (
        chosen**needed * _mean_square_share(graph.degree, needed, chosen) for needed in (0, 1, 2)
    )
    around = _around(graph)
    alone_N = own_N + around(one_N - two_N)

    def apply(x_N: Floats) -> Floats:
        around_N = around(x_N)
        active_N = alone_N * x_N + one_N * around_N + around(one_N * x_N + two_N * around_N)
        return (1 - chosen) * x_N + chosen * active_N

    return apply


def _mean_square_share(degree_N: NDArray[np.int64], needed: int, chosen: float) -> Floats:
    """E[1 / (1 + k)^2] for every client, k its active neighbours, of which `needed` are known to be active."""
    from scipy.stats import binom

    def expected(degree: int) -> float:
        others = np.arange(max(0, degree - needed) + 1)
        return float(binom.pmf(others, others[-1], chosen) @ (1 / (1 + needed + others) ** 2))

    distinct, place_N = np.unique(degree_N, return_inverse=True)
    return np.array([expected(degree) for degree in distinct.tolist()])[place_N]


def _largest_eigenvalue(apply: Apply, known_N: Floats, key: Key) -> float:
    """The largest modulus of an eigenvalue of a symmetric matrix in the space orthogonal to a known eigenvector."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    n = len(known_N)
    unit_N = known_N / np.linalg.norm(known_N)

    def project(x_N: Floats) -> Floats:
        return x_N - unit_N * (unit_N @ x_N)

    if n <= DENSE:
        columns = [project(apply(project(basis_N))) for basis_N in np.eye(n)]
        return float(np.abs(np.linalg.eigvalsh(np.stack(columns))).max())
    operator = LinearOperator(
        (n, n), matvec=lambda x_N: project(apply(project(x_N.ravel()))), dtype=np.float64
    )
    start_N = project(key.numpy().standard_normal(n))
    return float(
        abs(eigsh(operator, k=1, ncv=40, tol=1e-7, v0=start_N, return_eigenvectors=False)[0])
    )


def _around(graph: Graph) -> Apply:
    """x -> the sum over a client's neighbours of x."""
    if graph.is_complete:
        return lambda x_N: x_N.sum() - x_N
    adjacency = _adjacency(graph)
    return lambda x_N: np.asarray(adjacency @ x_N)


def _adjacency(graph: Graph) -> Matrix:
    hearer, heard = graph.pairs(range(graph.clients))
    other = hearer != heard
    return csr_array(
        (np.ones(other.sum()), (hearer[other], heard[other])), shape=(graph.clients, graph.clients)
    )
