"""From what neighbours answered to what an algorithm is told, as the simulator tells it.

Shapes: C = 1 client, N heard from, itself included, K models offered by each, M clusters asked for, P numbers in a model.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import LinkRule
from fedspd.core.ledger import NO_CLUSTER
from fedspd.node.peer.inbox import Moment
from fedspd.node.wire.messages import Announcement, Offer, Request


class Answer(NamedTuple):
    """One neighbour's part of an exchange: what it announced, and what was fetched of it."""

    client: int
    announcement: Announcement
    offer: Offer


def announcement(moment: Moment, asked: Exchange, degree: int) -> Announcement:
    clusters, weights, wants = (
        tuple(table[0].tolist())
        for table in (asked.cluster_CK, asked.weight_CK.double(), asked.want_CM)
    )
    note = 0 if asked.note_C is None else int(asked.note_C[0])
    return Announcement(*moment, clusters, weights, wants, note, degree)


def wanted(asked: Exchange, said: Announcement) -> tuple[int, ...]:
    """The clusters that are both wanted here and offered there."""
    wants = set(asked.want_CM[0].tolist()) - {NO_CLUSTER}
    return tuple(dict.fromkeys(cluster for cluster in said.clusters if cluster in wants))


def matching(clusters: list[int], model_KP: Tensor, request: Request) -> Offer:
    """The models that a request asks for, in the order in which they are offered."""
    rows = [k for k, cluster in enumerate(clusters) if cluster in request.wants]
    return Offer(tuple(clusters[k] for k in rows), model_KP[rows])


def neighbourhood(
    client: int, asked: Exchange, answers: list[Answer], degree: int, rule: LinkRule
) -> Neighbourhood:
    """What was heard and one's own offer, in the order of client numbers: the order of every sum."""
    own = Answer(
        client,
        announcement((0, 0), asked, degree),
        Offer(tuple(asked.cluster_CK[0].tolist()), asked.model_CKP[0]),
    )
    rows = sorted([*answers, own], key=lambda answer: answer.client)
    here = np.arange(len(rows))
    ids, degrees = (
        np.array(numbers)
        for numbers in ([row.client for row in rows], [row.announcement.degree for row in rows])
    )
    return Neighbourhood(
        np.array([client]),
        np.zeros_like(here),
        here,
        ids,
        _stacked(asked, rows),
        np.array([degree]),
        degrees,
        rule,
    )


def _stacked(asked: Exchange, rows: list[Answer]) -> Exchange:
    model_NKP = asked.model_CKP.new_zeros(len(rows), *asked.model_CKP.shape[1:])
    cluster_NK = torch.full(model_NKP.shape[:2], NO_CLUSTER)
    for n, row in enumerate(rows):
        fetched = [
            k
            for k, cluster in enumerate(row.announcement.clusters)
            if cluster in row.offer.clusters
        ]
        cluster_NK[n, fetched] = torch.tensor(row.offer.clusters, dtype=torch.long)
        model_NKP[n, fetched] = row.offer.model_KP.to(model_NKP)
    weight_NK = torch.tensor([row.announcement.weights for row in rows], dtype=torch.float64)
    note_N = torch.tensor([row.announcement.note for row in rows])
    want_NM = asked.want_CM.expand(len(rows), -1)
    return Exchange(cluster_NK, model_NKP, weight_NK, want_NM, note_N, asked.is_model)
