"""The edges of a graph of each kind, as numbers of pairs (see pairs.py); connected, or refused."""

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
    components,
    connected_choice,
    decode,
    encode,
    joining,
    pair_count,
)


def first_edges(options: TopologyOptions, n: int, key: Key) -> Ints:
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
    """Rows of about sqrt(n) clients, of which the last may be shorter."""
    width = math.isqrt(n - 1) + 1
    client = np.arange(n, dtype=np.int64)
    left = client[:-1][client[1:] % width != 0]
    upper = client[: max(0, n - width)]
    return encode(n, np.concatenate([left, upper]), np.concatenate([left + 1, upper + width]))


def _erdos_renyi(options: TopologyOptions, n: int, key: Key) -> Ints:
    """Every graph with this number of edges is as likely, up to the edges that are swapped to connect it."""
    rng = key.numpy()
    if options.probability is None:
        count = edge_count(options.expected_degree(n), n)
    else:
        count = max(n - 1, int(rng.binomial(pair_count(n), options.probability)))
    drawn = rng.choice(pair_count(n), count, replace=False)
    return connected_choice(n, np.concatenate([drawn, joining(n, drawn, rng)]), count)


def _barabasi_albert(options: TopologyOptions, n: int, key: Key) -> Ints:
    import networkx

    edges_per_client = max(1, round(options.expected_degree(n) / 2))
    edges = np.array(
        networkx.barabasi_albert_graph(n, edges_per_client, seed=key.number()).edges(),
        dtype=np.int64,
    )
    return encode(n, edges[:, 0], edges[:, 1])


def _random_geometric(options: TopologyOptions, n: int, key: Key) -> Ints:
    """The shortest links between random points; too long a gap is bridged, for the longest link that can be spared."""
    from scipy.spatial import cKDTree

    point_N2 = key.numpy().random((n, 2))
    if options.radius is None:
        count = edge_count(options.expected_degree(n), n)
    else:
        count = len(cKDTree(point_N2).query_pairs(options.radius, output_type="ndarray"))
    return connected_choice(n, _shortest_links(point_N2, count), count)


def _shortest_links(point_N2: NDArray[np.float64], count: int) -> Ints:
    """Links by length: at least `count`, and enough to connect all points."""
    from scipy.spatial import cKDTree

    n = len(point_N2)
    tree = cKDTree(point_N2)
    radius = math.sqrt((count + n) / (math.pi * pair_count(n)))
    while True:  # at the latest at the square's diagonal every pair is a link
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
    except OSError as problem:
        raise TopologyError(
            f"topology.file = '{path}' cannot be read ({problem.strerror}): give the path of an edge list."
        ) from None
    edges = [
        edge
        for place, line in enumerate(lines, 1)
        if (edge := _read_edge(line, f"{path}, line {place}", n))
    ]
    pair = np.array(edges, dtype=np.int64).reshape(-1, 2)
    number = encode(n, pair[:, 0], pair[:, 1])
    _check_connected(number, n, path)
    return number


def _read_edge(line: str, place: str, n: int) -> tuple[int, int] | None:
    words = line.partition("#")[0].split()
    if not words:
        return None
    if len(words) != 2 or not all(re.fullmatch("[0-9]{1,18}", word) for word in words):
        raise TopologyError(
            f"{place}: '{line.strip()}' is not an edge: expected two client ids such as '0 1'."
        )
    i, j = int(words[0]), int(words[1])
    if max(i, j) >= n:
        raise TopologyError(
            f"{place}: client {max(i, j)} does not exist: with clients = {n} the ids are 0 to {n - 1}."
        )
    if i == j:
        raise TopologyError(
            f"{place}: '{i} {j}' joins client {i} to itself: remove the line, every client hears itself anyway."
        )
    return i, j


def _check_connected(number: Ints, n: int, path: Path) -> None:
    count, label = components(n, number)
    if count == 1:
        return
    parts = "; ".join(_some(np.flatnonzero(label == part)) for part in range(min(count, 3)))
    more = "; ..." if count > 3 else ""
    raise TopologyError(
        f"topology.file = '{path}' is not connected but in {count} parts ({parts}{more}): add edges between them."
    )


def _some(clients: Ints) -> str:
    shown = ", ".join(map(str, clients[:5].tolist()))
    return f"{'client' if len(clients) == 1 else 'clients'} {shown}{', ...' if len(clients) > 5 else ''}"
