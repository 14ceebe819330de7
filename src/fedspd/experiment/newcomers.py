"""Clients that never took part: after training they hear their neighbours once, find their mixture, and make it their own."""

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
    """Newcomers behind the graph's clients, each with as many neighbours as a client has on average; only their links count."""
    n = graph.clients
    degree = n if graph.server else min(n, max(1, round(float(graph.degree.mean()))))
    links = [
        (n + i, int(j))
        for i in range(newcomers)
        for j in key.of("newcomer", i).numpy().choice(n, degree, replace=False)
    ]
    return Graph.from_edges(n + newcomers, links, server=graph.server)


def evaluate_newcomers(
    plan: Plan, graph: Graph, offers: Exchange, round: int
) -> tuple[Measures, Json]:
    """Every newcomer of the plan joins and finishes; what they score, and what was sent to them."""
    runner = BlockRunner(plan)
    ids = np.arange(len(offers.cluster_CK))
    clients = list(plan.train.clients)
    neighbourhood = Neighbourhood.of(replace(graph, rule="uniform"), clients, offers, ids)
    runner.join(neighbourhood, round - 1)
    runner.finish(round)
    senders = (
        len(clients) if graph.server else len(neighbourhood.sender_H)
    )  # a server sends each newcomer one mean
    models = senders * offers.cluster_CK.shape[1]
    size = offers.model_CKP.shape[2] * offers.model_CKP.element_size()
    measures = runner.measure()
    _, steps = runner.take_counters()  # theirs, not the network's
    return measures, {"models": models, "bytes": models * size, "steps": steps}
