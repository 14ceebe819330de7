"""Generators of connected graphs, one for each kind; edges are numbers of pairs (pairs.py)."""

import math
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedspd.core.errors import TopologyError
from fedspd.core.keys import Key
from fedspd.topology.options import TopologyOptions, edge_count
from fedspd.topology.pairs import (
    Ints,
    choose_connected,
    components,
    connecting_edges,
    decode,
    encode,
    pair_count,
)


def generate_edges(options: TopologyOptions, n: int, key: Key) -> Ints:
    """Return the edges of a connected graph of n clients."""
    match options.kind:
        case "ring":
            return _ring(n)
        case "grid":
            return _grid(n)
        case "complete" | "star":
            return np.arange(pair_count(n), dtype=np.int64)
        case "file":
            return _from_file(Path(str(options.file)), n)
        case _ if n == 1:
            return np.empty(0, dtype=np.int64)
        case "er":
            return _erdos_renyi(options, n, key)
        case "ba":
            return _barabasi_albert(options, n, key)
        case _:
            return _random_geometric(options, n, key)


def _ring(n: int) -> Ints:
    client = np.arange(n if n > 1 else 0, dtype=np.int64)
    return encode(n, client, (client + 1) % n)


def _grid(n: int) -> Ints:
    """Return a grid with rows of about sqrt(n) clients; the last row may be shorter."""
    width = math.isqrt(n - 1) + 1
    client = np.arange(n, dtype=np.int64)
    left = client[:-1][client[1:] % width != 0]
    upper = client[: max(0, n - width)]
    return encode(n, np.concatenate([left, upper]), np.concatenate([left + 1, upper + width]))


def _erdos_renyi(options: TopologyOptions, n: int, key: Key) -> Ints:
    """Return a graph drawn uniformly among those with its number of edges.

    If it is not connected, as few edges as possible are replaced to connect it.
    """
    rng = key.numpy()
    if options.probability is None:
        count = edge_count(options.expected_degree(n), n)
    else:
        count = max(n - 1, int(rng.binomial(pair_count(n), options.probability)))
    drawn = rng.choice(pair_count(n), count, replace=False)
    return choose_connected(n, np.concatenate([drawn, connecting_edges(n, drawn, rng)]), count)


def _barabasi_albert(options: TopologyOptions, n: int, key: Key) -> Ints:
    import networkx

    edges_per_client = max(1, round(options.expected_degree(n) / 2))
    graph = networkx.barabasi_albert_graph(n, edges_per_client, seed=key.number())
    edges = np.array(graph.edges(), dtype=np.int64)
    return encode(n, edges[:, 0], edges[:, 1])


def _random_geometric(options: TopologyOptions, n: int, key: Key) -> Ints:
    """Return the shortest links between random points.

    If they do not connect all points, the shortest links that do replace the longest ones.
    """
    from scipy.spatial import cKDTree

    point_N2 = key.numpy().random((n, 2))
    if options.radius is None:
        count = edge_count(options.expected_degree(n), n)
    else:
        i, j = cKDTree(point_N2).query_pairs(options.radius, output_type="ndarray").T
        number = encode(n, i.astype(np.int64), j.astype(np.int64))
        _check_radius(options.radius, point_N2, number)
        return np.sort(number)
    return choose_connected(n, _shortest_links(point_N2, count), count)


def _check_radius(radius: float, point_N2: NDArray[np.float64], number: Ints) -> None:
    """Refuse a radius at which the points are not connected, and name the smallest that does."""
    n = len(point_N2)
    if components(n, number)[0] == 1:
        return
    links = choose_connected(n, _shortest_links(point_N2, n - 1), n - 1)
    smallest = math.ceil(_length(point_N2, links).max() * 10_000) / 10_000
    raise TopologyError(
        f"topology.radius = {radius:g}: the {n} clients of this seed are not connected; expected "
        f"at least {smallest:g}. Raise it, or set topology.degree instead."
    )


def _shortest_links(point_N2: NDArray[np.float64], count: int) -> Ints:
    """Return links by length: at least `count`, and enough to connect all points."""
    from scipy.spatial import cKDTree

    n = len(point_N2)
    tree = cKDTree(point_N2)
    radius = math.sqrt((count + n) / (math.pi * pair_count(n)))
    while True:  # ends at the latest when the radius is the diagonal of the unit square
        i, j = tree.query_pairs(radius, output_type="ndarray").astype(np.int64).T
        number = encode(n, i, j)
        if len(number) >= count and components(n, number)[0] == 1:
            return number[np.argsort(_length(point_N2, number), kind="stable")]
        radius *= 1.25


def _length(point_N2: NDArray[np.float64], number: Ints) -> NDArray[np.float64]:
    i, j = decode(len(point_N2), number)
    return np.asarray(np.hypot(*(point_N2[i] - point_N2[j]).T), dtype=np.float64)


def _from_file(path: Path, n: int) -> Ints:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise TopologyError(
            f"topology.file = '{path}': cannot be read ({error.strerror}); expected an edge list."
        ) from None
    edges = (_parse_edge(line, f"{path}:{number}", n) for number, line in enumerate(lines, 1))
    pair = np.array([edge for edge in edges if edge], dtype=np.int64).reshape(-1, 2)
    number = encode(n, pair[:, 0], pair[:, 1])
    _check_connected(number, n, path)
    return number


def _parse_edge(line: str, location: str, n: int) -> tuple[int, int] | None:
    words = line.partition("#")[0].split()
    if not words:
        return None
    if len(words) != 2 or not all(re.fullmatch("[0-9]{1,18}", word) for word in words):
        raise TopologyError(
            f"{location}: '{line.strip()}' is not an edge; expected two client ids, such as '0 1'."
        )
    i, j = int(words[0]), int(words[1])
    if max(i, j) >= n:
        raise TopologyError(
            f"{location}: client {max(i, j)} does not exist with clients = {n}; "
            f"expected ids from 0 to {n - 1}."
        )
    if i == j:
        raise TopologyError(
            f"{location}: '{i} {j}' joins client {i} to itself; expected two clients. "
            "Remove the line."
        )
    return i, j


def _check_connected(number: Ints, n: int, path: Path) -> None:
    count, label = components(n, number)
    if count == 1:
        return
    parts = "; ".join(_list_clients(np.flatnonzero(label == part)) for part in range(min(count, 3)))
    more = "; ..." if count > 3 else ""
    raise TopologyError(
        f"topology.file = '{path}': {count} components ({parts}{more}); expected a connected "
        "graph. Add edges between them."
    )


def _list_clients(clients: Ints) -> str:
    noun = "client" if len(clients) == 1 else "clients"
    ids = ", ".join(map(str, clients[:5].tolist()))
    return f"{noun} {ids}{', ...' if len(clients) > 5 else ''}"
