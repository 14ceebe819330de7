"""From options to the graph of every round."""

import numpy as np

from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.topology.generators import generate_edges
from fedspd.topology.options import TopologyOptions, check
from fedspd.topology.pairs import Ints, absent, decode, pair_count

NO_EDGES: Ints = np.empty(0, dtype=np.int64)


class Topology:
    """The graphs of a run, one per round."""

    def __init__(self, options: TopologyOptions, clients: int, key: Key) -> None:
        self.options = options
        self.clients = clients
        self._key = key
        is_star = options.kind == "star"
        if (options.kind == "complete" or is_star) and not options.remove:
            self._first = NO_EDGES  # a list of all pairs is never needed
            graph = Graph.complete(clients, options.rule, is_star)
        else:
            self._first = generate_edges(options, clients, key.at(1))
            graph = self._graph(self._first)
        self._latest = 1, self._first, graph

    @property
    def kind(self) -> str:
        """The kind of graph, as in the options."""
        return self.options.kind

    def at(self, round: int) -> Graph:
        """Return the graph of a round.

        The next round takes one step, an earlier round starts again from round 1.
        """
        last = round if self.options.remove else 1
        now, edges, graph = self._latest
        if last == now:
            return graph
        if last < now:
            now, edges = 1, self._first
        for step in range(now + 1, last + 1):
            edges = self._next_edges(edges, self._key.at(step).numpy())
        self._latest = last, edges, self._graph(edges)
        return self._latest[2]

    def _next_edges(self, edges: Ints, rng: np.random.Generator) -> Ints:
        """Return the next round's edges, whose expected number is that of round 1.

        Each edge is removed with probability `remove`; new ones replace them.
        """
        kept = edges[rng.random(len(edges)) >= self.options.remove]
        others = pair_count(self.clients) - len(edges)
        if not others:
            return kept
        missing = len(self._first) - (1 - self.options.remove) * len(edges)
        probability = min(1.0, max(0.0, missing / others))
        added = rng.choice(others, rng.binomial(others, probability), replace=False)
        return np.sort(np.concatenate([kept, absent(edges, added)]))

    def _graph(self, edges: Ints) -> Graph:
        n, rule = self.clients, self.options.rule
        if len(edges) == pair_count(n):
            return Graph.complete(n, rule)
        return Graph.from_edges(n, np.stack(decode(n, edges), axis=1), rule)


def build_topology(options: TopologyOptions, clients: int, key: Key) -> Topology:
    """Return the topology of a run; it depends on the arguments alone."""
    check(options, clients)
    return Topology(options, clients, key.of("topology"))
