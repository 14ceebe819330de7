"""What an algorithm asks of the network, and what it is told.

Shapes: C clients in the block, N clients heard from, K models offered by each, M clusters asked for, P numbers in a
model, H pairs (a client of the block, somebody it hears, itself included).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.sparse as sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspd.core.graph import Graph, LinkRule
from fedspd.core.learner import one_thread
from fedspd.core.ledger import NOTHING
from fedspd.core.robust import ROBUST

AT_ONCE = 1 << 24  # numbers that a robust mean looks at together


@dataclass(frozen=True)
class Exchange:
    """Offer models to the neighbours, and listen to theirs. This is all that ever leaves a client."""

    cluster_CK: Tensor  # which cluster each offered model belongs to
    model_CKP: Tensor  # only what is really sent; FedSPD: K = 1, FedEM: K = S
    weight_CK: Tensor  # the number of examples behind it; a link rule may or may not use it
    want_CM: Tensor  # the clusters that the client listens to; a neighbour sends no others
    note_C: Tensor | None = None  # a small integer that goes along with the announcement
    is_model: bool = True  # False: a few numbers, which are not counted as models


class ReceivedModel(NamedTuple):
    """One model that came from a neighbour."""

    client: int
    note: int
    cluster: int
    model_P: Tensor


class Mean(NamedTuple):
    model_CMP: Tensor
    received_CM: Tensor  # false where nobody, not even the client itself, offered that cluster: the mean is 0 there


@dataclass(frozen=True)
class Neighbourhood:
    """The answer to an Exchange: what each client of the block heard, itself included, in the order of client ids."""

    clients: NDArray[np.int64]  # [C]
    receiver_H: NDArray[np.int64]  # row in the block
    sender_H: NDArray[np.int64]  # row among those heard from
    sender_ids: NDArray[np.int64]  # [N] ascending
    offers: Exchange  # of the N clients heard from
    degree_C: NDArray[np.int64]  # in the whole graph
    degree_N: NDArray[np.int64]  # of the N clients heard from, in the whole graph
    rule: LinkRule = "uniform"
    alike: bool = (
        False  # all clients hear the same and weigh it alike: the pairs are those of the first one
    )

    @classmethod
    def of(
        cls,
        graph: Graph,
        clients: Sequence[int],
        offers: Exchange,
        sender_ids: NDArray[np.int64] | None = None,
    ) -> "Neighbourhood":
        """Whoever is not among the sender_ids is silent and is left out. None: everybody speaks."""
        ids = np.arange(graph.clients) if sender_ids is None else sender_ids
        alike = graph.is_complete and graph.rule not in ("metropolis", "clipped")
        hearer, heard = graph.pairs(clients[:1] if alike else clients)
        if sender_ids is not None:
            speaks = np.isin(heard, ids)
            hearer, heard = hearer[speaks], heard[speaks]
        degree = graph.degree
        sender = np.searchsorted(ids, heard)
        return cls(
            np.asarray(clients),
            hearer,
            sender,
            ids,
            offers,
            degree[list(clients)],
            degree[ids],
            graph.rule,
            alike,
        )

    def mean(self, want_CM: Tensor) -> Mean:
        """Eq. 1: for each client, the mean of the models of each wanted cluster that were offered around it."""
        average = robust_mean if self.rule in ROBUST else keyed_mean
        if not self.alike:
            return average(self, want_CM)
        wanted, place_CM = torch.unique(want_CM, return_inverse=True)
        mean = average(self, wanted[None])
        return Mean(*(part[0][place_CM.to(part.device)] for part in mean))

    def mean_or_own(self, centers_CSP: Tensor) -> Tensor:
        """For every cluster the mean of what is heard of it; where nothing is, the client's own center."""
        all_CS = torch.arange(centers_CSP.shape[1]).expand(len(centers_CSP), -1)
        mean = self.mean(all_CS)
        return torch.where(mean.received_CM[:, :, None], mean.model_CMP, centers_CSP)

    def heard(self, c: int) -> Iterator[ReceivedModel]:
        """The models that client c of the block received from others: those of the clusters that it wants."""
        offers, wants = self.offers, self._wants(int(self.clients[c]))
        low, high = np.searchsorted(self.receiver_H, [0, 1] if self.alike else [c, c + 1])
        for n in self.sender_H[low:high]:
            if self.sender_ids[n] == self.clients[c]:
                continue
            note = 0 if offers.note_C is None else int(offers.note_C[n])
            for k, cluster in enumerate(offers.cluster_CK[n].tolist()):
                if cluster in wants:
                    yield ReceivedModel(
                        int(self.sender_ids[n]), note, cluster, offers.model_CKP[n, k]
                    )

    def _wants(self, client: int) -> set[int]:
        """A newcomer, which is not among those heard from, wants whatever there is."""
        own = self.sender_ids == client
        said = self.offers.want_CM[torch.from_numpy(own)] if own.any() else self.offers.cluster_CK
        return set(said.flatten().tolist()) - {NOTHING}


def keyed_mean(heard: Neighbourhood, want_CM: Tensor) -> Mean:
    """The one formula that averages, sparse over the graph's edges. Simulator, cluster and peer all call it.

    Every sum runs over the senders in ascending order, whatever the block, so the result does too.
    """
    matrix = mixing_matrix(heard, want_CM)
    mean = _times(matrix, heard.offers.model_CKP.flatten(0, 1))
    return _as_mean(mean, matrix, want_CM)


def robust_mean(heard: Neighbourhood, want_CM: Tensor) -> Mean:
    """As keyed_mean, by a rule that no matrix can express."""
    matrix, model_AP = mixing_matrix(heard, want_CM), heard.offers.model_CKP.flatten(0, 1)
    M, K = want_CM.shape[1], heard.offers.cluster_CK.shape[1]
    mean = model_AP.new_zeros(matrix.shape[0], model_AP.shape[1])
    for row_R, column_RH in _rows_of_one_length(matrix, AT_ONCE // max(1, model_AP.shape[1])):
        own_RH = heard.sender_ids[column_RH // K] == heard.clients[row_R // M][:, None]
        row, column, own = (
            torch.from_numpy(part).to(model_AP.device) for part in (row_R, column_RH, own_RH)
        )
        with one_thread():
            mean[row] = ROBUST[heard.rule](model_AP[column], own)
    return _as_mean(mean, matrix, want_CM)


def _rows_of_one_length(
    matrix: "sparse.csr_array[np.float64]", most: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """row_R and column_RH of the rows with H entries each, for every H above 0, at most about so many entries at a time."""
    length = np.diff(matrix.indptr)
    for H in np.unique(length[length > 0]).tolist():
        rows = np.flatnonzero(length == H)
        for row_R in np.split(rows, range(step := max(1, most // H), len(rows), step)):
            yield (
                row_R,
                matrix.indices[matrix.indptr[row_R][:, None] + np.arange(H)].astype(np.int64),
            )


def _as_mean(mean: Tensor, matrix: "sparse.csr_array[np.float64]", want_CM: Tensor) -> Mean:
    count = torch.from_numpy(np.diff(matrix.indptr)).reshape(want_CM.shape)
    return Mean(mean.reshape(*want_CM.shape, mean.shape[1]), count.to(mean.device) > 0)


def mixing_matrix(heard: Neighbourhood, want_CM: Tensor) -> "sparse.csr_array[np.float64]":
    """The rows of W: [C M, N K], each non-empty one with sum 1."""
    offered_NK, want = heard.offers.cluster_CK.cpu().numpy(), want_CM.cpu().numpy()
    (C, M), (N, K) = want.shape, offered_NK.shape
    h, m, k = np.nonzero(
        offered_NK[heard.sender_H][:, None, :] == want[heard.receiver_H][:, :, None]
    )
    hearer, sender = heard.receiver_H[h], heard.sender_H[h]
    row = hearer * M + m
    link = _links(heard, hearer, sender, k, row)
    share = link / np.bincount(row, link)[row]
    order = np.lexsort((k, sender, row))
    start = np.searchsorted(row[order], np.arange(C * M + 1))
    return sparse.csr_array((share[order], (sender * K + k)[order], start), shape=(C * M, N * K))


def _links(
    heard: Neighbourhood,
    hearer: NDArray[np.int64],
    sender: NDArray[np.int64],
    k: NDArray[np.int64],
    row: NDArray[np.int64],
) -> NDArray[np.float64]:
    """How much each heard model counts, before a row is made to sum to 1."""
    if heard.rule == "examples":
        link = heard.offers.weight_CK.cpu().numpy().astype(np.float64)[sender, k]
        return np.where(
            np.bincount(row, link)[row] > 0, link, 1.0
        )  # no example behind any of a row: all alike
    if heard.rule != "metropolis":
        return np.ones(len(sender))
    link = 1.0 / (1.0 + np.maximum(heard.degree_C[hearer], heard.degree_N[sender]))
    own = heard.sender_ids[sender] == heard.clients[hearer]
    others = np.bincount(row[~own], link[~own], minlength=row.max(initial=0) + 1)
    return np.where(own, 1.0 - others[row], link)


def _times(matrix: "sparse.csr_array[np.float64]", dense: Tensor) -> Tensor:
    if dense.device.type == "cpu":
        numbers = dense.detach().contiguous().numpy()
        return torch.from_numpy(matrix.astype(numbers.dtype) @ numbers)
    start, column, share = (
        torch.from_numpy(part).to(dense.device)
        for part in (matrix.indptr, matrix.indices, matrix.data)
    )
    rows: Tensor = (
        torch.sparse_csr_tensor(start, column, share.to(dense.dtype), matrix.shape) @ dense
    )
    return rows
