"""What a method asks of the network, and what it receives.

Shapes: C clients in the block, N senders that the block receives from, K models offered by each,
M clusters wanted, P parameters of a model (buffers included), H pairs of a receiver in the block
and one of its senders, itself included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse as sparse
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from torch import Tensor

from fedspd.core.graph import Graph, LinkRule
from fedspd.core.learner import one_thread
from fedspd.core.ledger import NO_CLUSTER
from fedspd.core.links import link_weights
from fedspd.core.options import Options, split_names
from fedspd.core.robust import MIN_VOICES, ROBUST, aggregate
from fedspd.core.travel import Home, ModelPart

MAX_ELEMENTS = 1 << 24  # that a robust mean holds in memory at a time
CSR: TypeAlias = "sparse.csr_array[np.float64]"


class ExchangeOptions(Options):
    """How models travel between clients."""

    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Field(
            description="The data type in which models travel; `bfloat16` halves the bytes. With "
            "`float32` they travel in the top-level `dtype`."
        ),
    ] = "float32"
    only: Annotated[
        list[str] | None,
        BeforeValidator(split_names),
        Field(
            min_length=1,
            description="The names of modules of the model that travel, such as `0,2.norm`; all "
            "others stay at home, and every client trains its own. The default is all. Frozen "
            "parameters never travel.",
        ),
    ] = None

    def travel_dtype(self, dtype: torch.dtype, is_model: bool) -> torch.dtype:
        """Return the type in which vectors of this type travel; only models are shortened."""
        return torch.bfloat16 if is_model and self.dtype == "bfloat16" else dtype

    def round(self, exchange: "Exchange") -> "Exchange":
        """Return the exchange with its models as they arrive, in their own data type."""
        model_CKP = exchange.model_CKP
        dtype = self.travel_dtype(model_CKP.dtype, exchange.is_model)
        if dtype == model_CKP.dtype:
            return exchange
        return replace(exchange, model_CKP=model_CKP.to(dtype).to(model_CKP.dtype))


@dataclass(frozen=True)
class Exchange:
    """An offer of models to the neighbours, and a request for theirs: all that leaves a client.

    cluster_CK   the cluster of each offered model; NO_CLUSTER (-1): this offer is not made
    model_CKP    the offered models, or other vectors of one size
    weight_CK    the number of examples behind each; the rule "examples" weighs by it
    want_CM      the clusters that the client wants to receive; neighbours send no others
    note_C       a small integer that travels with the announcement
    is_model     whether the vectors count as models; False for a few numbers
    part         which part of models the vectors are: bodies or heads, as learner.cut cuts
    """

    cluster_CK: Tensor
    model_CKP: Tensor
    weight_CK: Tensor
    want_CM: Tensor
    note_C: Tensor | None = None
    is_model: bool = True
    part: ModelPart = "model"

    @property
    def has_parameters(self) -> bool:
        """Whether the vectors are of a model's parameters, even if they do not count as models."""
        return self.is_model or self.part != "model"


class ReceivedModel(NamedTuple):
    """A model that came from a neighbour: the parameters of it that travel."""

    client: int
    note: int
    cluster: int
    model_P: Tensor


class Mean(NamedTuple):
    """The mean model of every wanted cluster; 0 where nothing was received."""

    model_CMP: Tensor
    received_CM: Tensor  # false where no one, not even the client itself, offered the cluster


@dataclass(frozen=True)
class Neighbourhood:
    """The answer to an Exchange: what each client received, itself included, by ascending sender.

    clients           ids of the block's clients, [C]
    receiver_H        row of the receiver in the block
    sender_H          row of the sender among the senders
    sender_ids        ids of the senders, ascending, [N]
    offers            the offers of the N senders
    degree_C          degrees of the block's clients in the whole graph
    degree_N          degrees of the senders in the whole graph
    is_same_for_all   all clients receive the same and weigh it equally: H has the first one's pairs
    home              what stayed at home; None: all of the offered vectors travelled
    """

    clients: NDArray[np.int64]
    receiver_H: NDArray[np.int64]
    sender_H: NDArray[np.int64]
    sender_ids: NDArray[np.int64]
    offers: Exchange
    degree_C: NDArray[np.int64]
    degree_N: NDArray[np.int64]
    rule: LinkRule = "uniform"
    is_same_for_all: bool = False
    home: Home | None = None

    @classmethod
    def of(
        cls,
        graph: Graph,
        clients: Sequence[int],
        offers: Exchange,
        sender_ids: NDArray[np.int64] | None = None,
    ) -> "Neighbourhood":
        """Return what the clients receive from those of sender_ids; None: from all clients."""
        ids = np.arange(graph.clients) if sender_ids is None else sender_ids
        is_same = graph.is_complete and graph.rule not in ("metropolis", "clipped")
        receiver, sender = graph.pairs(clients[:1] if is_same else clients)
        if sender_ids is not None:
            is_there = np.isin(sender, ids)
            receiver, sender = receiver[is_there], sender[is_there]
        degree = graph.degree
        return cls(
            np.asarray(clients),
            receiver,
            np.searchsorted(ids, sender),
            ids,
            offers,
            degree[list(clients)],
            degree[ids],
            graph.rule,
            is_same,
        )

    def own_models(self) -> Tensor:
        """Return model_CKP as the block's clients offered it, so that no method keeps a copy."""
        if self.home is not None:
            return self.home.offer_CKL
        rows = torch.from_numpy(np.searchsorted(self.sender_ids, self.clients))
        return self.offers.model_CKP[rows.to(self.offers.model_CKP.device)]

    def mean(self, want_CM: Tensor) -> Mean:
        """Return each client's mean of the received models of each wanted cluster (Eq. 1).

        What does not travel is as in the client's own offer of that cluster, else 0.
        """
        mean = self._mean(want_CM)
        if self.home is None:
            return mean
        return mean._replace(
            model_CMP=self.home.complete(mean.model_CMP, self._own_offers(want_CM))
        )

    def _own_offers(self, want_CM: Tensor) -> Tensor:
        """Return own_CM: which of its own offers has the wanted cluster; -1: none."""
        row_of, own_CM = self._first_rows(), torch.full(want_CM.shape, -1)
        for c, client in enumerate(self.clients):
            n = row_of.get(int(client))
            offered = [] if n is None else self.offers.cluster_CK[n].tolist()
            for m, cluster in enumerate(want_CM[c].tolist()):
                if cluster != NO_CLUSTER and cluster in offered:
                    own_CM[c, m] = offered.index(cluster)
        return own_CM

    def _first_rows(self) -> dict[int, int]:
        """Return each sender's first row: of a silent client, that of its own offer."""
        return {int(sender): row for row, sender in reversed([*enumerate(self.sender_ids)])}

    def keep_home(self, model_CML: Tensor, own_CML: Tensor) -> Tensor:
        """Return the models with the parameters of own_CML that do not travel."""
        if self.home is None:
            return model_CML
        return torch.where(self.home.travels_L.to(model_CML.device), model_CML, own_CML)

    def travelling(self, model_CSP: Tensor) -> Tensor:
        """Return those parameters of models that travel, in the order of received models.

        The models may end early: any number of parameters, from the first one.
        """
        if self.home is None:
            return model_CSP
        return model_CSP[..., self.home.travels_L[: model_CSP.shape[-1]]]

    def _mean(self, want_CM: Tensor) -> Mean:
        average = robust_mean if self.rule in ROBUST else keyed_mean
        if not self.is_same_for_all:
            return average(self, want_CM)
        wanted, index_CM = torch.unique(want_CM, return_inverse=True)
        mean = average(self, wanted[None])
        mean = Mean(*(part[0][index_CM.to(part.device)] for part in mean))
        return self._keep_own(mean, want_CM) if self.rule in ROBUST else mean

    def _keep_own(self, mean: Mean, want_CM: Tensor) -> Mean:
        """Return the common mean, or the client's own model where too few offer a cluster."""
        offered_HK = self.offers.cluster_CK[torch.from_numpy(self.sender_H)]
        cluster, voices = torch.unique(offered_HK, return_counts=True)
        own_CM, row_of = self._own_offers(want_CM), self._first_rows()
        is_kept_CM = torch.isin(want_CM, cluster[voices < MIN_VOICES]) & (own_CM >= 0)
        for c, m in is_kept_CM.nonzero().tolist():
            n = row_of[int(self.clients[c])]
            mean.model_CMP[c, m] = self.offers.model_CKP[n, own_CM[c, m]]
        return mean

    def average_centers(self, centers_CSP: Tensor) -> Tensor:
        """Return the mean of every cluster; the client's own center where nothing was received.

        By a robust rule, it also keeps the own center of a cluster that it did not offer itself
        where fewer than three did: no rule can tell which of them is false. A newcomer, which
        offers nothing, has no center to keep.
        """
        all_CS = torch.arange(centers_CSP.shape[1]).expand(len(centers_CSP), -1)
        mean = self.mean(all_CS)
        model_CSP = mean.model_CMP
        if self.home is not None:
            is_own_CS1 = (self._own_offers(all_CS) >= 0)[:, :, None].to(model_CSP.device)
            kept_CSP = self.keep_home(model_CSP, centers_CSP)
            model_CSP = torch.where(is_own_CS1, model_CSP, kept_CSP)
        is_taken_CS = mean.received_CM
        if self.rule in ROBUST:
            is_taken_CS = is_taken_CS & ~self._lacks_voices(all_CS).to(is_taken_CS.device)
        return torch.where(is_taken_CS[:, :, None], model_CSP, centers_CSP)

    def _lacks_voices(self, all_CS: Tensor) -> Tensor:
        """Return whether a client that offered others lacks three voices for a cluster."""
        cluster_NK, (C, S) = self.offers.cluster_CK, all_CS.shape
        voices_HS = (cluster_NK[torch.from_numpy(self.sender_H), :, None] == all_CS[0]).sum(1)
        receiver_H = torch.from_numpy(self.receiver_H)
        voices_CS = torch.zeros(C, S, dtype=torch.long).index_add(0, receiver_H, voices_HS)
        if self.is_same_for_all:
            voices_CS = voices_CS[:1].expand(C, S)
        row_of = self._first_rows()
        rows = [row_of.get(int(client)) for client in self.clients]
        offers_C1 = torch.tensor(
            [[n is not None and bool((cluster_NK[n] != NO_CLUSTER).any())] for n in rows]
        )
        return (voices_CS < MIN_VOICES) & offers_C1 & (self._own_offers(all_CS) < 0)

    def with_own(self, cluster_CS: Tensor, model_CSP: Tensor, weight_CS: Tensor) -> "Neighbourhood":
        """Return the answer with further models of each client, which it did not offer.

        In every mean they count as the client's own model; no other client sees them. Use the
        result for means only.
        """
        (C, S), (N, K) = cluster_CS.shape, self.offers.cluster_CK.shape
        receiver_H, sender_H = self.receiver_H, self.sender_H
        if self.is_same_for_all:  # so far
            receiver_H, sender_H = np.repeat(np.arange(C), len(sender_H)), np.tile(sender_H, C)
        offers, own_A = self.offers, np.repeat(np.arange(C), S)  # the client of each own model
        tables = (
            (offers.cluster_CK, cluster_CS),
            (offers.model_CKP, model_CSP),
            (offers.weight_CK, weight_CS),
        )  # every model becomes a sender of one model
        cluster, model, weight = (
            torch.cat([a.flatten(0, 1), b.flatten(0, 1).to(a)])[:, None] for a, b in tables
        )
        want = offers.want_CM[:1].expand(len(cluster), -1)
        sender = (sender_H[:, None] * K + np.arange(K)).flatten()
        return replace(
            self,
            receiver_H=np.concatenate([np.repeat(receiver_H, K), own_A]),
            sender_H=np.concatenate([sender, N * K + np.arange(C * S)]),
            sender_ids=np.concatenate([np.repeat(self.sender_ids, K), self.clients[own_A]]),
            offers=Exchange(cluster, model, weight, want, is_model=offers.is_model),
            degree_N=np.concatenate([np.repeat(self.degree_N, K), self.degree_C[own_A]]),
            is_same_for_all=False,
        )

    def largest(self) -> Tensor:
        """Return each client's offer with the largest first number, its own included.

        Ties go to the least second number. An offer that is not made comes last.
        """
        offer_NX = self.offers.model_CKP[:, 0]
        is_none_N = self.offers.cluster_CK[:, 0].cpu().numpy() == NO_CLUSTER
        order_N = np.lexsort(
            (offer_NX[:, 1].cpu().numpy(), -offer_NX[:, 0].cpu().numpy(), is_none_N)
        )
        rank_N = np.empty(len(order_N), np.int64)
        rank_N[order_N] = np.arange(len(order_N))
        best_C = np.full(self.receiver_H.max(initial=-1) + 1, len(order_N))
        np.minimum.at(best_C, self.receiver_H, rank_N[self.sender_H])
        rows = torch.from_numpy(order_N[best_C])
        return (
            offer_NX[rows].expand(len(self.clients), -1) if self.is_same_for_all else offer_NX[rows]
        )

    def received(self, c: int) -> Iterator[ReceivedModel]:
        """Yield the models of wanted clusters that row c of the block received from others."""
        offers, wants = self.offers, self._wants(int(self.clients[c]))
        row = 0 if self.is_same_for_all else c
        low, high = np.searchsorted(self.receiver_H, [row, row + 1])
        for n in self.sender_H[low:high]:
            sender = int(self.sender_ids[n])
            if sender == self.clients[c]:
                continue
            note = 0 if offers.note_C is None else int(offers.note_C[n])
            for k, cluster in enumerate(offers.cluster_CK[n].tolist()):
                if cluster in wants:
                    yield ReceivedModel(sender, note, cluster, offers.model_CKP[n, k])

    def _wants(self, client: int) -> set[int]:
        """Return the clusters that a client wants; a newcomer, which made no offer, wants all."""
        own = self.sender_ids == client
        wants = self.offers.want_CM[torch.from_numpy(own)] if own.any() else self.offers.cluster_CK
        return set(wants.flatten().tolist()) - {NO_CLUSTER}


def keyed_mean(received: Neighbourhood, want_CM: Tensor) -> Mean:
    """Return the linear mean, sparse over the graph's edges; simulator, cluster and peer call it.

    Every sum runs over the senders in ascending order, so its bits do not depend on the block.
    """
    matrix = mixing_matrix(received, want_CM)
    mean = _times(matrix, received.offers.model_CKP.flatten(0, 1))
    return _as_mean(mean, matrix, want_CM)


def robust_mean(received: Neighbourhood, want_CM: Tensor) -> Mean:
    """Return the mean by a rule of robust.py, which no matrix can express."""
    matrix, model_AP = mixing_matrix(received, want_CM), received.offers.model_CKP.flatten(0, 1)
    M, K = want_CM.shape[1], received.offers.cluster_CK.shape[1]
    mean = model_AP.new_zeros(matrix.shape[0], model_AP.shape[1])
    for row_R, column_RH in _rows_of_one_length(matrix, MAX_ELEMENTS // max(1, model_AP.shape[1])):
        own_RH = received.sender_ids[column_RH // K] == received.clients[row_R // M][:, None]
        own_RH &= not received.is_same_for_all  # the mean is not that of the first client alone
        row, column, own = (
            torch.from_numpy(part).to(model_AP.device) for part in (row_R, column_RH, own_RH)
        )
        with one_thread():
            mean[row] = aggregate(received.rule, model_AP[column], own)
    return _as_mean(mean, matrix, want_CM)


def _rows_of_one_length(
    matrix: CSR, max_entries: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield row_R and column_RH of the rows with H entries, for every H above 0, in chunks."""
    length = np.diff(matrix.indptr)
    for H in np.unique(length[length > 0]).tolist():
        rows, step = np.flatnonzero(length == H), max(1, max_entries // H)
        for row_R in np.split(rows, range(step, len(rows), step)):
            column_RH = matrix.indices[matrix.indptr[row_R][:, None] + np.arange(H)]
            yield row_R, column_RH.astype(np.int64)


def _as_mean(mean: Tensor, matrix: CSR, want_CM: Tensor) -> Mean:
    count = torch.from_numpy(np.diff(matrix.indptr)).reshape(want_CM.shape)
    return Mean(mean.reshape(*want_CM.shape, mean.shape[1]), count.to(mean.device) > 0)


def mixing_matrix(received: Neighbourhood, want_CM: Tensor) -> CSR:
    """Return the rows of W, [C M, N K]; each row with an entry sums to 1."""
    offered_NK, want = received.offers.cluster_CK.cpu().numpy(), want_CM.cpu().numpy()
    (C, M), (N, K) = want.shape, offered_NK.shape
    offered_HK, want_HM = offered_NK[received.sender_H], want[received.receiver_H]
    is_match_HMK = offered_HK[:, None, :] == want_HM[:, :, None]
    h, m, k = np.nonzero(is_match_HMK & (want_HM != NO_CLUSTER)[:, :, None])
    receiver, sender = received.receiver_H[h], received.sender_H[h]
    row = receiver * M + m
    share = link_weights(
        received.rule,
        row_L=row,
        is_own_L=received.sender_ids[sender] == received.clients[receiver],
        examples_L=received.offers.weight_CK.cpu().numpy().astype(np.float64)[sender, k],
        degree_L=np.maximum(received.degree_C[receiver], received.degree_N[sender]),
    )
    order = np.lexsort((k, sender, row))
    start = np.searchsorted(row[order], np.arange(C * M + 1))
    return sparse.csr_array((share[order], (sender * K + k)[order], start), shape=(C * M, N * K))


def _times(matrix: CSR, dense: Tensor) -> Tensor:
    if dense.device.type == "cpu":
        rows = dense.detach().contiguous().numpy()
        return torch.from_numpy(matrix.astype(rows.dtype) @ rows)
    start, column, share = (
        torch.from_numpy(part).to(dense.device)
        for part in (matrix.indptr, matrix.indices, matrix.data)
    )
    weights = torch.sparse_csr_tensor(start, column, share.to(dense.dtype), matrix.shape)
    product: Tensor = weights @ dense
    return product
