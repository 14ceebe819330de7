"""Processor seconds to build a random graph of a million edges, and two smaller ones."""

import time

from fedspd.core.keys import Key
from fedspd.topology.build import build_topology
from fedspd.topology.options import TopologyOptions

DEGREE = 6


def main() -> None:
    """Print one row for every number of edges."""
    for edges in (10_000, 100_000, 1_000_000):
        clients = edges * 2 // DEGREE
        started = time.process_time()
        graph = build_topology(TopologyOptions(degree=DEGREE), clients, Key(0)).at(1)
        seconds = time.process_time() - started
        print(f"{int(graph.degree.sum()) // 2:,} edges, {clients:,} clients: {seconds:.2f} s")


if __name__ == "__main__":
    main()
