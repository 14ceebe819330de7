"""Topologies: the graph of every round, its mixing matrix, and how well it mixes."""

from fedspd.topology.build import Topology, build_topology
from fedspd.topology.diagnostics import (
    consensus_rate,
    describe,
    diameter,
    diameter_bound,
    spectral_gap,
)
from fedspd.topology.mixing import graph_mixing_matrix
from fedspd.topology.options import KIND_OPTIONS, TopologyOptions

__all__ = [
    "KIND_OPTIONS",
    "Topology",
    "TopologyOptions",
    "build_topology",
    "consensus_rate",
    "describe",
    "diameter",
    "diameter_bound",
    "graph_mixing_matrix",
    "spectral_gap",
]
