"""From options to the graph of every round."""

import numpy as np

from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.topology.kinds import first_edges
from fedspd.topology.options import TopologyOptions, check
from fedspd.topology.pairs import Ints, absent, decode, pair_count


class Topology:
    """The graphs of a run, one per round."""

    def __init__(self, options: TopologyOptions, clients: int, key: Key) -> None:
        self.options = options
        self.clients = clients
        self._key = key
        everyone = (
            options.kind in ("complete", "star") and not options.remove
        )  # no edge is ever asked for
        self._first = (
            np.empty(0, dtype=np.int64) if everyone else first_edges(options, clients, key.at(1))
        )
        first = (
            Graph.complete(clients, options.rule, options.kind == "star")
            if everyone
            else self._graph(self._first)
        )
        self._latest = 1, self._first, first

    @property
    def kind(self) -> str:
        return self.options.kind

    def at(self, round: int) -> Graph:
        """The graph of a round; round 1 has the first one. The next round costs one step, an earlier one a replay."""
        last = round if self.options.remove else 1
        now, edges, graph = self._latest
        if last == now:
            return graph
        if last < now:
            now, edges = 1, self._first
        for step in range(now + 1, last + 1):
            edges = self._changed(edges, self._key.at(step).numpy())
        self._latest = last, edges, self._graph(edges)
        return self._latest[2]

    def _changed(self, edges: Ints, rng: np.random.Generator) -> Ints:
        """Edges go with probability remove; others come, so many that the number is expected to be the first one again."""
        kept = edges[rng.random(len(edges)) >= self.options.remove]
        others = pair_count(self.clients) - len(edges)
        missing = len(self._first) - (1 - self.options.remove) * len(edges)
        add = min(1.0, max(0.0, missing / others)) if others else 0.0
        chosen = (
            rng.choice(others, rng.binomial(others, add), replace=False)
            if others
            else np.empty(0, dtype=np.int64)
        )
        return np.sort(np.concatenate([kept, absent(edges, chosen)]))

    def _graph(self, edges: Ints) -> Graph:
        n, rule = self.clients, self.options.rule
        if len(edges) == pair_count(n):
            return Graph.complete(n, rule)
        return Graph.from_edges(n, np.stack(decode(n, edges), axis=1), rule)


def build_topology(options: TopologyOptions, clients: int, key: Key) -> Topology:
    """The topology of a run; it follows from the options, the number of clients and the seed alone."""
    check(options, clients)
    return Topology(options, clients, key.of("topology"))
