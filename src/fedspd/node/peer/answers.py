"""Announcements and models of neighbours as the `Neighbourhood` that an algorithm gets.

Shapes: C = 1 client, N senders including the client itself, K models offered by each, M clusters
wanted, P parameters of a model.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import LinkRule
from fedspd.core.ledger import NO_CLUSTER
from fedspd.node.peer.inbox import ExchangeId
from fedspd.node.wire.messages import Announcement, Offer, Request


class Answer(NamedTuple):
    """One neighbour's part of an exchange: its announcement and the models fetched from it."""

    client: int
    announcement: Announcement
    offer: Offer


def build_announcement(
    exchange_id: ExchangeId, exchange: Exchange, degree: int, rule: LinkRule
) -> Announcement:
    """Return the announcement of an exchange: everything but its models.

    How many examples a node has is only said where the rule weighs by them.
    """
    clusters = tuple(exchange.cluster_CK[0].tolist())
    weights = tuple(exchange.weight_CK[0].double().tolist())
    return Announcement(
        round=exchange_id.round,
        exchange=exchange_id.number,
        clusters=clusters,
        weights=weights if rule == "examples" else (1.0,) * len(clusters),
        wants=tuple(exchange.want_CM[0].tolist()),
        note=0 if exchange.note_C is None else int(exchange.note_C[0]),
        degree=degree,
    )


def clusters_to_fetch(exchange: Exchange, announcement: Announcement) -> tuple[int, ...]:
    """Return the clusters that this node wants and the neighbour offers."""
    wants = set(exchange.want_CM[0].tolist()) - {NO_CLUSTER}
    return tuple(cluster for cluster in announcement.clusters if cluster in wants)


def select_models(clusters: list[int], model_KP: Tensor, request: Request) -> Offer:
    """Return the requested models, in the order in which they were announced."""
    rows = [k for k, cluster in enumerate(clusters) if cluster in request.wants]
    return Offer(tuple(clusters[k] for k in rows), model_KP[rows])


def build_neighbourhood(
    client: int, exchange: Exchange, answers: list[Answer], degree: int, rule: LinkRule
) -> Neighbourhood:
    """Return the answers and the node's own offer, ordered by client: the order of every sum."""
    own_offer = Offer(tuple(exchange.cluster_CK[0].tolist()), exchange.model_CKP[0])
    own = Answer(client, build_announcement(ExchangeId(0, 0), exchange, degree, rule), own_offer)
    rows = sorted([*answers, own], key=lambda answer: answer.client)
    senders = np.arange(len(rows))
    return Neighbourhood(
        np.array([client]),
        np.zeros_like(senders),
        senders,
        np.array([row.client for row in rows]),
        _stack_offers(exchange, rows),
        np.array([degree]),
        np.array([row.announcement.degree for row in rows]),
        rule,
    )


def _stack_offers(exchange: Exchange, rows: list[Answer]) -> Exchange:
    """Return one exchange with a row for every sender; models not fetched are of no cluster."""
    model_NKP = exchange.model_CKP.new_zeros(len(rows), *exchange.model_CKP.shape[1:])
    cluster_NK = torch.full(model_NKP.shape[:2], NO_CLUSTER)
    for n, row in enumerate(rows):
        announced, fetched = row.announcement.clusters, row.offer.clusters
        columns = [k for k, cluster in enumerate(announced) if cluster in fetched]
        cluster_NK[n, columns] = torch.tensor(fetched, dtype=torch.long)
        model_NKP[n, columns] = row.offer.model_KP.to(model_NKP)
    weight_NK = torch.tensor([row.announcement.weights for row in rows], dtype=torch.float64)
    want_NM = exchange.want_CM.expand(len(rows), -1)
    note_N = torch.tensor([row.announcement.note for row in rows])
    return Exchange(cluster_NK, model_NKP, weight_NK, want_NM, note_N, exchange.is_model)
