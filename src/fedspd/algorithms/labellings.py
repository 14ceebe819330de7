"""Labellings: which cluster is which, so that clients never mix the clusters of two splits.

Clients that split together number their clusters alike: they have one labelling. Where the network
is cut during the split, each part has its own. A labelling is a number that travels as the note of
an exchange. Its high bits are the norm of the first corner, its low bits are a checksum of all
corners, and the last one says whether each cluster has a body of its own. The largest labelling
wins: its first corner is the most extreme one, so that a large part of a network usually prevails,
and a client that was left alone never does.

A client averages with the neighbours of its own labelling alone. One that is offered a better one
gives up its own, and in the next round it joins the better one as a newcomer does: it offers
nothing, and takes body, V, D and S from its neighbours. So does a client that was away.

Shapes: C clients in the block, N senders, K vectors offered by each, M keys wanted, S clusters,
B parameters of a body, Q of a head.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspd.algorithms.split_state import State
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Mean, Neighbourhood
from fedspd.core.ledger import NO_CLUSTER
from fedspd.core.robust import MIN_VOICES, ROBUST

NO_LABELLING = -1
CHECKSUM_BITS = 24  # a float32 holds such an integer exactly
OWN_BODIES = 1  # the last bit of a labelling
# The largest norm of a first corner is a finite number; a neighbour may announce any note.
MAX_NORM = torch.finfo(torch.float32).max
MAX_LABELLING = (int(np.float32(MAX_NORM).view(np.int32)) + 1 << CHECKSUM_BITS) - 1
NOTHING = NO_CLUSTER - 1  # a key that no one offers
WITNESSES = 2  # neighbours that a robust rule asks for, since one may be Byzantine


def name_labelling(norm_C: Tensor, corner_CS: Tensor, clusters_C: Tensor) -> Tensor:
    """Return labelling_C from the norm of the first corner and the clients at the corners."""
    bits_C = norm_C.float().clamp(0, MAX_NORM).cpu().numpy().view(np.int32).astype(np.int64)
    rows = zip(corner_CS.long().tolist(), clusters_C.tolist(), strict=True)
    checksum_C = np.array([_checksum([S, *clients[:S]]) for clients, S in rows], np.int64)
    return torch.from_numpy((bits_C << CHECKSUM_BITS) | checksum_C)


def own_labelling(clients: Sequence[int], clusters_C: Tensor) -> Tensor:
    """Return the labelling of clients that share theirs with no one; any other is larger."""
    rows = zip(clients, clusters_C.tolist(), strict=True)
    return torch.tensor([_checksum([S, client]) for client, S in rows], dtype=torch.long)


def _checksum(numbers: Sequence[int]) -> int:
    return zlib.crc32(np.array(numbers, "<i8").tobytes()) & ((1 << CHECKSUM_BITS) - OWN_BODIES - 1)


def with_own_bodies(labelling_C: Tensor, has_own_C: Tensor) -> Tensor:
    """Return the labelling that also says whether each cluster has a body of its own."""
    return torch.where(labelling_C == NO_LABELLING, labelling_C, labelling_C | has_own_C.long())


def has_own_bodies(labelling_C: Tensor) -> Tensor:
    return (labelling_C != NO_LABELLING) & (labelling_C & OWN_BODIES).bool()


def pack_labelling(labelling_C: Tensor) -> Tensor:
    """Return the labelling as two numbers that float32 holds exactly."""
    high_C = (labelling_C.clamp(min=0) >> CHECKSUM_BITS).numpy().astype(np.int32)
    norm_C = torch.from_numpy(high_C.view(np.float32).copy())
    norm_C = torch.where(labelling_C == NO_LABELLING, -1.0, norm_C)
    checksum_C = labelling_C.clamp(min=0) & ((1 << CHECKSUM_BITS) - 1)
    return torch.stack([norm_C, checksum_C.float()], 1)


def unpack_labelling(packed_C2: Tensor) -> Tensor:
    """Return labelling_C from its two numbers."""
    norm_C, checksum_C = packed_C2.detach().cpu().float().unbind(1)
    bits_C = norm_C.clamp(min=0).contiguous().numpy().view(np.int32).astype(np.int64)
    low_C = checksum_C.nan_to_num().clamp(0, (1 << CHECKSUM_BITS) - 1).long()
    found_C = (torch.from_numpy(bits_C) << CHECKSUM_BITS) | low_C
    return torch.where(norm_C >= 0, found_C, NO_LABELLING)


def best_labelling(answer: Neighbourhood) -> Tensor:
    """Return the largest labelling among each client and its senders; NO_LABELLING: none has one.

    Under a robust rule two senders must announce it, or the only one.
    """
    note_N = _notes(answer)
    if (note_N == note_N[:1]).all():
        return torch.full((len(answer.clients),), int(note_N[0]), dtype=torch.long)
    received = [note_N[answer.sender_H[own]] for own in _rows(answer)]
    needed = WITNESSES if answer.rule in ROBUST else 1
    best = [_largest_announced(notes, min(needed, len(notes) - 1)) for notes in received]
    best_C = torch.tensor(best, dtype=torch.long)
    return best_C.expand(len(answer.clients)) if answer.is_same_for_all else best_C


def _rows(answer: Neighbourhood) -> list[NDArray[np.int64]]:
    """Return the pairs of every receiver; of the first one alone where all receive the same."""
    count = 1 if answer.is_same_for_all else len(answer.clients)
    start = np.searchsorted(answer.receiver_H, np.arange(count + 1))
    return [np.arange(low, high) for low, high in pairwise(start)]


def _largest_announced(notes: NDArray[np.int64], needed: int) -> int:
    found, count = np.unique(notes, return_counts=True)
    return int(found[count >= needed].max(initial=NO_LABELLING))


def mean_of_labelling(answer: Neighbourhood, labelling_C: Tensor, want_CM: Tensor) -> Mean:
    """Return the mean of every wanted cluster over the senders that have the given labelling."""
    offered_NK, note_N = answer.offers.cluster_CK, torch.from_numpy(_notes(answer))
    names = torch.unique(torch.cat([note_N, labelling_C]))
    width = 1 + int(max(offered_NK.max(), want_CM.max()))

    def keys(cluster: Tensor, labelling: Tensor, missing: int) -> Tensor:
        shifted = cluster + width * torch.searchsorted(names, labelling)[:, None]
        return torch.where(cluster == NO_CLUSTER, missing, shifted)

    offers = replace(answer.offers, cluster_CK=keys(offered_NK, note_N, NO_CLUSTER))
    return replace(answer, offers=offers).mean(keys(want_CM, labelling_C, NOTHING))


def mean_of_any_cluster(answer: Neighbourhood, labelling_C: Tensor) -> Mean:
    """Return the mean of all vectors that come from senders with the given labelling."""
    cluster_NK = answer.offers.cluster_CK.clamp(max=0)
    offers = replace(answer.offers, cluster_CK=cluster_NK)
    want_C1 = torch.zeros(len(labelling_C), 1, dtype=torch.long)
    return mean_of_labelling(replace(answer, offers=offers), labelling_C, want_C1)


def left_alone(answer: Neighbourhood) -> Tensor:
    """Return whether each client has neighbours, but received from none of them.

    Under a robust rule a client is alone with too few as well: it keeps its own.
    """
    count = np.array([len(own) for own in _rows(answer)])
    needed = MIN_VOICES if answer.rule in ROBUST else 2
    return torch.from_numpy((count < needed) & (answer.degree_C > 0))


def _notes(answer: Neighbourhood) -> NDArray[np.int64]:
    """Return the labellings of the senders; a note that cannot be one is none."""
    note_N = answer.offers.note_C
    assert note_N is not None
    notes: NDArray[np.int64] = note_N.long().cpu().numpy()
    return np.where(notes > MAX_LABELLING, NO_LABELLING, notes)


# ---- exchanges


class Heads(NamedTuple):
    """The clusters' heads after an exchange, and the labelling that they have."""

    heads_CSQ: Tensor
    clusters_C: Tensor
    labelling_C: Tensor
    has_joined_C: Tensor  # the labelling of its neighbours, in this exchange


def exchange_picked_body(
    body_CB: Tensor, picked_C1: Tensor, labelling_C: Tensor, clusters: int, data: Block
) -> Round[Tensor]:
    """Average the body with the neighbours that picked the same cluster.

    A client that joins takes the bodies of all clusters.
    """
    joins_C1, all_S = (labelling_C == NO_LABELLING)[:, None], torch.arange(clusters)
    want_CS = torch.where(all_S == 0, picked_C1, NO_CLUSTER)
    answer = yield Exchange(
        torch.where(joins_C1, NO_CLUSTER, picked_C1),
        body_CB[:, None],
        data.counts_C[:, None],
        torch.where(joins_C1, all_S, want_CS),
        labelling_C,
        part="body",
    )
    mean_CB = mean_of_labelling(answer, labelling_C, picked_C1).model_CMP[:, 0]
    if not joins_C1.any():
        return mean_CB
    shared = mean_of_any_cluster(answer, best_labelling(answer))
    shared_CB = torch.where(shared.received_CM, shared.model_CMP[:, 0], body_CB)
    return answer.keep_home(torch.where(joins_C1, shared_CB, mean_CB), body_CB)


def exchange_heads(
    heads_CSQ: Tensor, clusters_C: Tensor, labelling_C: Tensor, data: Block
) -> Round[Heads]:
    """Average one vector per cluster with the neighbours, each under its own index."""
    joins_C, index_S = labelling_C == NO_LABELLING, torch.arange(heads_CSQ.shape[1])
    is_offered_CS = (index_S < clusters_C[:, None]) & ~joins_C[:, None]
    offered_CS = torch.where(is_offered_CS, index_S, NO_CLUSTER)
    want_CS = torch.where(joins_C[:, None], index_S, offered_CS)
    weight_CS = data.counts_C[:, None].expand_as(want_CS)
    answer = yield Exchange(
        offered_CS, heads_CSQ, weight_CS, want_CS, labelling_C, is_model=False, part="head"
    )
    best_C = best_labelling(answer)
    labelling_C = torch.where(joins_C, best_C, labelling_C)
    mean = mean_of_labelling(answer, labelling_C, want_CS)
    has_joined_C = joins_C & mean.received_CM[:, 0]
    found_C = mean.received_CM.sum(1).clamp(min=1)
    clusters_C = torch.where(has_joined_C, found_C, clusters_C)
    # a better one is joined in the next round; one that is offered none names its own to be joined
    labelling_C = torch.where(best_C > labelling_C, NO_LABELLING, labelling_C)
    waits_C = joins_C & ~has_joined_C
    labelling_C = torch.where(waits_C, own_labelling(data.clients, clusters_C), labelling_C)
    mean_CSQ = torch.where(waits_C[:, None, None], heads_CSQ, mean.model_CMP)
    return Heads(mean_CSQ, clusters_C, labelling_C, has_joined_C)


def with_own_labelling(search: Round[State], alone_C: Tensor, data: Block) -> Round[State]:
    """Run a part of the split; clients that it leaves alone share their labelling with no one.

    A client is left alone if it received from no one before, or in one of the part's exchanges.
    """
    try:
        asked = next(search)
        while True:
            answer = yield asked
            alone_C = alone_C | left_alone(answer)
            asked = search.send(answer)
    except StopIteration as end:
        state: State = end.value
    is_alone_C = alone_C & (state.labelling_C != NO_LABELLING)
    own_C = own_labelling(data.clients, state.clusters_C)
    return replace(state, labelling_C=torch.where(is_alone_C, own_C, state.labelling_C))
