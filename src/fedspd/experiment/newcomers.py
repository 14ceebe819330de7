"""Newcomers: clients that join after training.

Each receives its neighbours' models once, finds its mixture and trains its personal model.
"""

from dataclasses import replace

import numpy as np

from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.measures import Measures
from fedspd.runtime.plan import Plan
from fedspd.storage.atomic import Json


def attach_newcomers(graph: Graph, newcomers: int, key: Key) -> Graph:
    """Return a graph with the newcomers' edges alone; their ids follow those of the clients.

    Each newcomer has as many neighbours as a client has on average.
    """
    n = graph.clients
    degree = n if graph.server else min(n, max(1, round(float(graph.degree.mean()))))
    edges = [
        (n + i, int(j))
        for i in range(newcomers)
        for j in key.of("newcomer", i).numpy().choice(n, degree, replace=False)
    ]
    return Graph.from_edges(n + newcomers, edges, server=graph.server)


def evaluate_newcomers(
    plan: Plan, graph: Graph, offers: Exchange, round: int
) -> tuple[Measures, Json]:
    """Let every newcomer of the plan join and finish; return their scores and their traffic."""
    runner = BlockRunner(plan)
    ids = np.arange(len(offers.cluster_CK))
    clients = list(plan.train.clients)
    neighbourhood = Neighbourhood.of(replace(graph, rule="uniform"), clients, offers, ids)
    runner.join(neighbourhood, round - 1)
    runner.finish(round)
    measures = runner.measure()
    _, steps = runner.take_counters()  # the newcomers' own, not counted for the network
    # a server sends each newcomer one mean per cluster
    senders = len(clients) if graph.server else len(neighbourhood.sender_H)
    models = senders * offers.cluster_CK.shape[1]
    model_bytes = offers.model_CKP.shape[2] * offers.model_CKP.element_size()
    return measures, {"models": models, "bytes": models * model_bytes, "steps": steps}
