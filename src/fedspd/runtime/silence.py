"""Clients that send nothing, as their privacy budget is spent, but go on listening.

What such a client offers is withheld from the exchange, and given back to the client alone in the
answer. So neither an engine nor a peer has to know about it.

Shapes: C clients of the block, K models offered by each, M clusters wanted, P parameters of a
model, N senders, L silent clients of the block, H pairs of a receiver and a sender.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.ledger import NO_CLUSTER


@dataclass(frozen=True)
class Withheld:
    """What silent clients would have offered: their ids, and one row for each of them."""

    client_L: NDArray[np.int64]
    offers: Exchange

    @classmethod
    def of(cls, exchange: Exchange, rows: list[int], clients: list[int]) -> "Withheld":
        return cls(np.array([clients[row] for row in rows]), _select(exchange, torch.tensor(rows)))


def withhold(exchange: Exchange, rows: list[int], has_public_wants: bool) -> Exchange:
    """Return the exchange in which these rows offer nothing, and tell nothing.

    Clusters that are wanted because of the examples would tell of them: such a client wants all.
    """
    is_silent_C1 = torch.zeros(len(exchange.cluster_CK), 1, dtype=torch.bool)
    is_silent_C1[rows] = True
    want_CM, note_C = exchange.want_CM, exchange.note_C
    every_M = torch.arange(want_CM.shape[1])
    model_CKP = exchange.model_CKP.clone()
    model_CKP[rows] = 0
    return replace(
        exchange,
        cluster_CK=torch.where(is_silent_C1, NO_CLUSTER, exchange.cluster_CK),
        model_CKP=model_CKP,
        want_CM=want_CM if has_public_wants else torch.where(is_silent_C1, every_M, want_CM),
        note_C=None if note_C is None else torch.where(is_silent_C1[:, 0], 0, note_C),
    )


def restore_own(answer: Neighbourhood, withheld: Withheld) -> Neighbourhood:
    """Return the answer in which silent clients have their own offers, which no other client has.

    Each becomes a sender of its own, before the one of the same client that offers nothing.
    """
    ids = np.concatenate([withheld.client_L, answer.sender_ids])
    order = np.argsort(ids, kind="stable")
    place = np.argsort(order, kind="stable")  # of every row in the new order
    receiver_H, sender_H = _pairs(answer)
    client_H, L = answer.clients[receiver_H], len(withheld.client_L)
    new_H = place[L + sender_H]
    for own_row, client in enumerate(withheld.client_L):
        is_own_H = (client_H == client) & (answer.sender_ids[sender_H] == client)
        new_H = np.where(is_own_H, place[own_row], new_H)
    want_NM = answer.offers.want_CM.clone()
    for client, own_M in zip(withheld.client_L, withheld.offers.want_CM, strict=True):
        want_NM[torch.from_numpy(answer.sender_ids == client)] = own_M.to(want_NM)
    joined = _join(withheld.offers, replace(answer.offers, want_CM=want_NM))
    row_of = {int(client): row for row, client in enumerate(answer.clients)}
    degree_L = answer.degree_C[[row_of[int(client)] for client in withheld.client_L]]
    return replace(
        answer,
        receiver_H=receiver_H,
        sender_H=new_H,
        sender_ids=ids[order],
        offers=_select(joined, torch.from_numpy(order)),
        degree_N=np.concatenate([degree_L, answer.degree_N])[order],
        is_same_for_all=False,
    )


def _pairs(answer: Neighbourhood) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return receiver_H and sender_H of all clients."""
    if not answer.is_same_for_all:
        return answer.receiver_H, answer.sender_H
    C, senders = len(answer.clients), len(answer.sender_H)
    return np.repeat(np.arange(C), senders), np.tile(answer.sender_H, C)


def _join(one: Exchange, other: Exchange) -> Exchange:
    """Return both, one below the other."""

    def both(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a.to(b), b])

    note_C = other.note_C
    if note_C is not None:
        own_C = torch.zeros(len(one.cluster_CK)) if one.note_C is None else one.note_C
        note_C = both(own_C, note_C)
    return replace(
        other,
        cluster_CK=both(one.cluster_CK, other.cluster_CK),
        model_CKP=both(one.model_CKP, other.model_CKP),
        weight_CK=both(one.weight_CK, other.weight_CK),
        want_CM=both(one.want_CM, other.want_CM),
        note_C=note_C,
    )


def _select(exchange: Exchange, rows: Tensor) -> Exchange:
    note_C = exchange.note_C
    return replace(
        exchange,
        cluster_CK=exchange.cluster_CK[rows],
        model_CKP=exchange.model_CKP[rows.to(exchange.model_CKP.device)],
        weight_CK=exchange.weight_CK[rows],
        want_CM=exchange.want_CM[rows],
        note_C=None if note_C is None else note_C[rows],
    )
