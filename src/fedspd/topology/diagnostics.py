"""How connected a graph is, and how fast its exchanges lead to consensus.

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

MAX_EXACT_DIAMETER = 2_000  # clients; above, the diameter is a lower bound
MAX_DENSE = 500  # clients; above, the eigenvalues are those of a sparse operator


def describe(topology: Topology, key: Key, clusters: int = 2) -> dict[str, Any]:
    """Return the properties of the first round's graph; the key seeds the eigenvalue solver."""
    graph = topology.at(1)
    degree_N = graph.degree
    hops, is_exact = diameter(graph)
    rate = consensus_rate(graph, clusters, key.of("consensus rate"))
    return {
        "kind": topology.kind,
        "weights": graph.rule,
        "clients": graph.clients,
        "edges": int(degree_N.sum()) // 2,
        "degree_min": int(degree_N.min()),
        "degree_mean": float(degree_N.mean()),
        "degree_max": int(degree_N.max()),
        "connected": _is_connected(graph),
        "diameter": hops,
        "diameter_exact": is_exact,
        "spectral_gap": spectral_gap(graph, key.of("spectral gap")),
        "clusters": clusters,
        "consensus_rate": rate,
        "notes": _notes(topology, graph, is_exact, rate),
    }


def _notes(topology: Topology, graph: Graph, is_exact: bool, rate: float) -> list[str]:
    options, mean = topology.options, float(graph.degree.mean())
    expected = options.expected_degree(graph.clients)
    notes = []
    if topology.kind == "ba" and abs(mean - expected) > 0.005:
        notes.append(f"the average degree is {mean:.3g} instead of {expected:g}")
    if not is_exact:
        notes.append(
            f"the diameter is a lower bound: it is exact up to {MAX_EXACT_DIAMETER} clients"
        )
    if options.remove:
        probability = f"with probability {options.remove:g}"
        notes.append(f"this is round 1; each later round removes an edge {probability}")
    if graph.rule == "examples":
        notes.append("all clients have the same weight here, since their examples are not known")
    if graph.rule in ROBUST:
        notes.append(f"{graph.rule} is not linear: spectral gap and p are those of uniform weights")
    if rate <= 0:
        notes.append(
            "p <= 0: with these weights an exchange may lead clients apart; metropolis cannot"
        )
    return notes


def diameter(graph: Graph) -> tuple[int, bool]:
    """Return the diameter of a connected graph, and whether it is exact.

    For many clients it is a lower bound by two breadth-first searches.
    """
    if graph.is_complete:
        return min(1, graph.clients - 1), True
    if graph.clients <= MAX_EXACT_DIAMETER:
        return max(_max_hops(graph, first) for first in range(0, graph.clients, 64)), True
    adjacency = _adjacency(graph)
    far = int(np.argmax(dijkstra(adjacency, indices=[0], unweighted=True)))
    return int(dijkstra(adjacency, indices=[far], unweighted=True).max()), False


def _max_hops(graph: Graph, first: int) -> int:
    """Return the most hops from any of the 64 clients from `first` on; each of them is a bit."""
    source = np.arange(first, min(first + 64, graph.clients))
    reached_N = np.zeros(graph.clients, dtype=np.uint64)
    reached_N[source] = np.uint64(1) << (source - first).astype(np.uint64)
    hops = 0
    while True:
        next_N = np.bitwise_or.reduceat(reached_N[graph.member], graph.offset[:-1])
        if np.array_equal(next_N, reached_N):
            return hops
        reached_N, hops = next_N, hops + 1


def diameter_bound(topology: Topology) -> int:
    """Return a bound on the hops between two clients in round 1.

    Of a dynamic graph it is at least 2: later graphs are not complete, even if the first one is.
    """
    graph = topology.at(1)
    hops, is_exact = diameter(graph)
    if topology.options.remove:
        hops = max(hops, min(2, graph.clients - 1))
    return hops if is_exact else 2 * hops


def spectral_gap(graph: Graph, key: Key) -> float:
    """Return 1 - the second largest modulus of an eigenvalue of W.

    All clients are active and have the same number of examples. Uniform weights are D^-1 (A + I),
    which has the eigenvalues of the symmetric D^-1/2 (A + I) D^-1/2.
    """
    if graph.is_complete:
        return 1.0  # one exchange leads to consensus
    scale_N = np.ones(graph.clients) if graph.rule == "metropolis" else np.sqrt(graph.degree + 1.0)
    symmetric = diags_array(scale_N) @ graph_mixing_matrix(graph) @ diags_array(1 / scale_N)
    return 1 - _largest_eigenvalue(lambda x_N: symmetric @ x_N, scale_N, key)


def consensus_rate(graph: Graph, clusters: int, key: Key) -> float:
    """Return p of Assumption 7 with beta = 1.

    It is the largest p with E||W C - mean||^2 <= (1 - p) ||C - mean||^2 for every C. C has one row
    per client, and `mean` is the mean of its rows. Each client chooses this cluster independently
    with probability 1 / clusters. Since W keeps a consensus, 1 - p is the largest eigenvalue of
    E[W^T W] among the directions that sum to 0. The expectation is exact, not sampled. p is at most
    1; with weights that are not doubly stochastic it may be 0 or negative.
    """
    expected = _expected_metropolis if graph.rule == "metropolis" else _expected_uniform
    operator = expected(graph, 1 / clusters)
    return 1 - _largest_eigenvalue(operator, np.ones(graph.clients), key)


def _expected_metropolis(graph: Graph, chosen: float) -> Apply:
    """Return the operator x -> E[W^T W] x.

    W = I - sum of the active edges' Laplacians w_e L_e. An edge is active with probability q^2, two
    edges that share a client with q^3, and L_e L_f = 0 for two edges that share none. So with L =
    sum of w_e L_e, and since L_e L_e = 2 L_e:
    E[W W] = I - 2 q^2 L + q^3 L L + 2 (q^2 - q^3) sum of w_e^2 L_e.
    """
    weights, squares = _metropolis_sums(graph)
    ones_N = np.ones(graph.clients)
    weight_N, square_N = weights(ones_N), squares(ones_N)
    edge, edges = chosen**2, chosen**3

    def apply(x_N: Floats) -> Floats:
        once_N = weight_N * x_N - weights(x_N)
        twice_N = weight_N * once_N - weights(once_N)
        square_x_N = square_N * x_N - squares(x_N)
        extra_N = 2 * (edge - edges) * square_x_N
        return np.asarray(x_N - 2 * edge * once_N + edges * twice_N + extra_N)

    return apply


def _metropolis_sums(graph: Graph) -> tuple[Apply, Apply]:
    """Return the operators x -> the sums over a client's neighbours of w_e x and of w_e^2 x."""
    if graph.is_complete:
        neighbour_sum, n = _neighbour_sum(graph), graph.clients
        return lambda x_N: neighbour_sum(x_N) / n, lambda x_N: neighbour_sum(x_N) / n**2
    weights = graph_mixing_matrix(graph)
    weights.setdiag(0)
    squares = weights.power(2)
    return lambda x_N: np.asarray(weights @ x_N), lambda x_N: np.asarray(squares @ x_N)


def _expected_uniform(graph: Graph, chosen: float) -> Apply:
    """Return the operator x -> E[W^T W] x = sum over i of E[w_i w_i^T] x, with w_i row i of W.

    With k active neighbours, an active client's row is 1 / (1 + k) at itself and at these. The
    expected product of two of its entries is `own` for itself twice, `one` if one neighbour must be
    active, `two` if two must.
    """
    own_N, one_N, two_N = (
        chosen**needed * _mean_square_share(graph.degree, needed, chosen) for needed in (0, 1, 2)
    )
    neighbour_sum = _neighbour_sum(graph)
    alone_N = own_N + neighbour_sum(one_N - two_N)

    def apply(x_N: Floats) -> Floats:
        sum_N = neighbour_sum(x_N)
        active_N = alone_N * x_N + one_N * sum_N + neighbour_sum(one_N * x_N + two_N * sum_N)
        return (1 - chosen) * x_N + chosen * active_N

    return apply


def _mean_square_share(degree_N: NDArray[np.int64], needed: int, chosen: float) -> Floats:
    """Return E[1 / (1 + k)^2] of every client; `needed` of its k active neighbours are given."""

    def expected(degree: int) -> float:
        count = max(0, degree - needed)
        return float(_binomial(count, chosen) @ (1 / (1 + needed + np.arange(count + 1)) ** 2))

    distinct, index_N = np.unique(degree_N, return_inverse=True)
    return np.array([expected(degree) for degree in distinct.tolist()])[index_N]


def _binomial(count: int, chance: float) -> Floats:
    """Return the probabilities of 0 to `count` successes: scipy.stats takes a second to import."""
    if chance == 1:
        return np.asarray(np.eye(count + 1)[-1])
    log_factorial = np.cumsum(np.log([1, *range(1, count + 1)]))
    log_ways = log_factorial[-1] - log_factorial - log_factorial[::-1]
    successes = np.arange(count + 1)
    log_chance = successes * np.log(chance) + successes[::-1] * np.log1p(-chance)
    return np.asarray(np.exp(log_ways + log_chance))


def _largest_eigenvalue(apply: Apply, known_N: Floats, key: Key) -> float:
    """Return the largest modulus of a symmetric operator's eigenvalues, except a known one's.

    known_N is the eigenvector of that one.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh

    n = len(known_N)
    unit_N = known_N / np.linalg.norm(known_N)

    def project(x_N: Floats) -> Floats:
        return x_N - unit_N * (unit_N @ x_N)

    if n <= MAX_DENSE:
        columns = [project(apply(project(basis_N))) for basis_N in np.eye(n)]
        return float(np.abs(np.linalg.eigvalsh(np.stack(columns))).max())
    operator = LinearOperator(
        (n, n), matvec=lambda x_N: project(apply(project(x_N.ravel()))), dtype=np.float64
    )
    start_N = project(key.numpy().standard_normal(n))
    values = eigsh(operator, k=1, ncv=40, tol=1e-7, v0=start_N, return_eigenvectors=False)
    return float(abs(values[0]))


def _neighbour_sum(graph: Graph) -> Apply:
    """Return the operator x -> the sum over a client's neighbours of x."""
    if graph.is_complete:
        return lambda x_N: x_N.sum() - x_N
    adjacency = _adjacency(graph)
    return lambda x_N: np.asarray(adjacency @ x_N)


def _adjacency(graph: Graph) -> Matrix:
    receiver, sender = graph.pairs(range(graph.clients))
    is_edge = receiver != sender
    entries = np.ones(is_edge.sum()), (receiver[is_edge], sender[is_edge])
    return csr_array(entries, shape=(graph.clients, graph.clients))


def _is_connected(graph: Graph) -> bool:
    if graph.is_complete:
        return True
    return bool(connected_components(_adjacency(graph), directed=False)[0] == 1)
