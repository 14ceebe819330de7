"""Populations without a server: the directions in which clients differ, and the extreme clients.

Every client holds a vector d_i. Populations are the corners of the cloud of these vectors, since a
client may be a mixture of populations. Directions are the leading eigenvectors of the network mean
of d_i d_i' / |d_i|^2, by orthogonal iteration. Corners are found by successive projection. All
means are by accelerated gossip, all maxima by gossip over as many hops as the diameter.

Shapes: C clients, M directions, Q length of d_i, S clusters, X length of any vector.
"""

import torch
from torch import Tensor

from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange
from fedspd.core.keys import Key
from fedspd.core.robust import ROBUST

ITERATIONS = 5  # of the orthogonal iteration
EXCHANGES = 12  # of one network mean
LAMBDA = 0.96  # bound on the second eigenvalue of W, of the Chebyshev recursion
LEAST_RATIO = 2.0  # of two eigenvalues in a row that separate populations from noise


def neighbourhood_mean(x_CMX: Tensor, data: Block) -> Round[tuple[Tensor, bool]]:
    """Return W x, and whether the aggregation rule is linear."""
    all_CM = torch.arange(x_CMX.shape[1]).expand(len(data), -1)
    weight_CM = data.counts_C[:, None].expand_as(all_CM)
    answer = yield Exchange(all_CM, x_CMX, weight_CM, all_CM, is_model=False)
    return answer.mean(all_CM).model_CMP, answer.rule not in ROBUST


def network_mean(x_CMX: Tensor, data: Block) -> Round[Tensor]:
    """Return every client's estimate of the mean over the network, by a Chebyshev recursion.

    A robust mean is not linear, so that the recursion does not hold: it is applied as often.
    """
    before, (now, is_linear) = x_CMX, (yield from neighbourhood_mean(x_CMX, data))
    if data.diameter <= 1:
        return now
    a, b = 1.0, 1 / LAMBDA
    for _ in range(EXCHANGES - 1):
        mean, _ = yield from neighbourhood_mean(now, data)
        c = 2 * b / LAMBDA - a
        following = (2 * b / (LAMBDA * c)) * mean - (a / c) * before if is_linear else mean
        before, now, a, b = now, following, b, c
    return now


def network_largest(offer_CX: Tensor, data: Block) -> Round[Tensor]:
    """Return the offer with the largest first number; of several, that with the least second."""
    first_C1 = torch.zeros(len(data), 1, dtype=torch.long)
    for _ in range(data.diameter):
        answer = yield Exchange(
            first_C1, offer_CX[:, None], data.counts_C[:, None], first_C1, is_model=False
        )
        offer_CX = answer.largest()
    return offer_CX


def find_directions(d_CQ: Tensor, count: int, data: Block, key: Key) -> Round[Tensor]:
    """Return V_CMQ, every client's own estimate of the leading eigenvectors."""
    draw = torch.randn(d_CQ.shape[1], count, generator=key.torch(), dtype=torch.double)
    V_CMQ: Tensor = torch.linalg.qr(draw)[0].T.to(d_CQ).repeat(len(data), 1, 1)
    unit_CQ = _divide(d_CQ, d_CQ.norm(dim=1, keepdim=True))
    for _ in range(ITERATIONS):
        along_CM = (V_CMQ * unit_CQ[:, None]).sum(2)
        w_CMQ = yield from network_mean(along_CM[:, :, None] * unit_CQ[:, None], data)
        V_CMQ = _orthonormalise(w_CMQ)
    return V_CMQ


def _orthonormalise(w_CMQ: Tensor) -> Tensor:
    """Return the Q of a QR decomposition whose R has a positive diagonal."""
    q_CQM, r_CMM = torch.linalg.qr(w_CMQ.double().transpose(1, 2))
    sign_CM = torch.where(torch.diagonal(r_CMM, dim1=1, dim2=2) < 0, -1.0, 1.0)
    V_CMQ: Tensor = (q_CQM * sign_CM[:, None]).transpose(1, 2).to(w_CMQ).contiguous()
    return V_CMQ


def choose_clusters(z_CM: Tensor, d_CQ: Tensor, data: Block) -> Round[Tensor]:
    """Return clusters_C, one number for the network: the eigenvalues' largest gap decides.

    The clients' estimates differ a little, so that the client with the lowest id decides for all.
    """
    share_CM = _divide(z_CM.square(), d_CQ.square().sum(1, keepdim=True))
    value_C1M = yield from network_mean(share_CM[:, None], data)
    own_C = _largest_gap(value_C1M[:, 0], data.network_size)
    offer_C2 = torch.stack([-torch.tensor(data.clients), own_C], 1).to(z_CM)
    agreed_C2 = yield from network_largest(offer_C2, data)
    return agreed_C2[:, 1].round().long()


def _largest_gap(value_CM: Tensor, network_size: int) -> Tensor:
    """Return S = 1 + the eigenvalues before the largest ratio of two in a row, or 1."""
    usable = min(value_CM.shape[1], network_size - 1)  # the rank that so many clients allow
    if usable < 2:
        return torch.ones(len(value_CM), dtype=torch.long)
    value_CM = value_CM[:, :usable].clamp(min=0)
    ratio_CM = _divide(value_CM[:, :-1], value_CM[:, 1:].clamp(min=1e-12))
    best = ratio_CM.max(1)
    return torch.where(best.values >= LEAST_RATIO, best.indices + 2, 1)


def find_corners(z_CM: Tensor, clusters_C: Tensor, most: int, data: Block) -> Round[Tensor]:
    """Return corner_CSM: the coordinates of the most extreme clients, minus their mean.

    Successive projection takes the point of largest norm, projects it out of all, and goes on.
    Coordinates beyond a client's number of clusters are 0, and so are corners.
    """
    M = z_CM.shape[1]
    z_CM = torch.where(torch.arange(M) < clusters_C[:, None] - 1, z_CM, 0)
    scale_C11 = yield from network_mean(z_CM.norm(dim=1)[:, None, None], data)
    rest_CX = torch.cat([z_CM, scale_C11[:, 0]], 1)
    client_C = torch.tensor(data.clients).to(z_CM)
    corners = []
    for _ in range(most):
        norm_C = rest_CX.norm(dim=1)
        offer = torch.cat([torch.stack([norm_C, client_C], 1), rest_CX, z_CM], 1)
        best = yield from network_largest(offer, data)
        point_CX, corner_CM = best[:, 2 : 3 + M], best[:, 3 + M :]
        along_CX = _divide(point_CX, point_CX.norm(dim=1, keepdim=True))
        rest_CX = rest_CX - (rest_CX * along_CX).sum(1, keepdim=True) * along_CX
        corners.append(corner_CM)
    corner_CSM = torch.stack(corners, 1)
    is_used_CS1 = (torch.arange(most) < clusters_C[:, None])[:, :, None]
    mean_C1M = (corner_CSM * is_used_CS1).sum(1, keepdim=True) / clusters_C[:, None, None]
    return torch.where(is_used_CS1, corner_CSM - mean_C1M, 0)


def first_mixture(
    z_CM: Tensor, corner_CSM: Tensor, clusters_C: Tensor, data: Block
) -> Round[Tensor]:
    """Return u_CS = softmax(-2 dist^2 / mean dist^2) over the corners."""
    S = corner_CSM.shape[1]
    is_used_CS = torch.arange(S) < clusters_C[:, None]
    z_CM = torch.where(torch.arange(z_CM.shape[1]) < clusters_C[:, None] - 1, z_CM, 0)
    distance_CS = (z_CM[:, None] - corner_CSM).square().sum(2)
    own_C = torch.where(is_used_CS, distance_CS, 0).sum(1) / clusters_C
    mean_C11 = yield from network_mean(own_C[:, None, None], data)
    score_CS = -2 * _divide(distance_CS, mean_C11[:, 0])
    return score_CS.double().masked_fill(~is_used_CS, -torch.inf).softmax(1)


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient, and 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator, 0)
