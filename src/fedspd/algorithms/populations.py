"""Populations without a server: the directions in which clients differ, and the extreme clients.

Every client holds one vector for each of F folds of its examples, as they move the head of the same
model: the folds agree in what is the client's own, and not in what is chance. Directions are the
leading eigenvectors of the network mean of d_if d_ig' over pairs of different folds, by orthogonal
iteration. Populations are the corners of the cloud of the clients' coordinates, since a client may
be a mixture of populations; successive projection finds them. All means are by accelerated gossip,
all maxima by gossip over as many hops as the diameter. Numbers are those of docs/methods.md.

Shapes: C clients, F folds, K outputs of a head, B inputs, M directions, Q length of a vector, S
clusters, X length of any vector.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedspd.algorithms.labellings import mean_of_labelling, name_labelling
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.core.ledger import NO_CLUSTER
from fedspd.core.robust import ROBUST

ITERATIONS = 5  # of the orthogonal iteration
EXCHANGES = 12  # of one network mean
LAMBDA = 0.96  # bound on the second eigenvalue of W, of the Chebyshev recursion
ATTEMPTS = 3  # under a robust rule: farthest points that are tried for one corner
NEAR = 0.5  # of a corner's norm: within it, another client confirms the corner
LEAST_RATIO = 1.8  # of two eigenvalues in a row that separate populations from noise
LENGTH = 1.0  # of the first D_s, in lengths of V: so far apart, EM tells the clusters apart
NOISE = 0.5  # eigenvalues below this share of 1 / N are as good as 0


# ---- means and maxima over the network


def neighbourhood_mean(
    x_CMX: Tensor, data: Block, labelling_C: Tensor | None = None
) -> Round[tuple[Tensor, bool]]:
    """Return W x, and whether the aggregation rule is linear.

    With a labelling, the mean is over the neighbours that have the client's own.
    """
    all_CM = torch.arange(x_CMX.shape[1]).expand(len(data), -1)
    weight_CM = data.counts_C[:, None].expand_as(all_CM)
    answer = yield Exchange(all_CM, x_CMX, weight_CM, all_CM, labelling_C, is_model=False)
    if labelling_C is None:
        mean = answer.mean(all_CM)
    else:
        mean = mean_of_labelling(answer, labelling_C, all_CM)
    return mean.model_CMP, answer.rule not in ROBUST


def network_mean(x_CMX: Tensor, data: Block, labelling_C: Tensor | None = None) -> Round[Tensor]:
    """Return every client's estimate of the mean over the network."""
    mean_CMX, _ = yield from gossip_mean(x_CMX, data, labelling_C)
    return mean_CMX


def gossip_mean(
    x_CMX: Tensor, data: Block, labelling_C: Tensor | None = None
) -> Round[tuple[Tensor, bool]]:
    """Return the mean over the network by a Chebyshev recursion, and whether the rule is linear.

    `a`, `b` and `c` are the omegas of three steps in a row. A robust mean is not linear, so that
    the recursion does not hold: it is applied as often.
    """
    first = neighbourhood_mean(x_CMX, data, labelling_C)
    before, (now, is_linear) = x_CMX, (yield from first)
    if data.diameter <= 1:
        return now, is_linear
    a, b = 1.0, 1 / LAMBDA
    for _ in range(EXCHANGES - 1):
        mean, _ = yield from neighbourhood_mean(now, data, labelling_C)
        c = 2 * b / LAMBDA - a
        following = (2 * b / (LAMBDA * c)) * mean - (a / c) * before if is_linear else mean
        before, now, a, b = now, following, b, c
    return now, is_linear


def mean_by_cluster(
    x_CX: Tensor, cluster_C: Tensor, clusters: int, data: Block
) -> Round[tuple[Tensor, Tensor]]:
    """Return mean_CSX by a robust rule over the network, and is_found_CS1: whether any was there.

    A client gives its vector to its cluster, or to none (NO_CLUSTER), and passes all means on.
    """
    mean_CSX, offered_CS = x_CX[:, None], cluster_C[:, None]
    all_CS = torch.arange(clusters).expand(len(data), -1)
    for _ in range(1 if data.diameter <= 1 else EXCHANGES):
        weight_CS = data.counts_C[:, None].expand_as(offered_CS)
        answer = yield Exchange(offered_CS, mean_CSX, weight_CS, all_CS, is_model=False)
        mean_CSX, is_found_CS = answer.mean(all_CS)
        offered_CS = torch.where(is_found_CS, all_CS, NO_CLUSTER)
    return mean_CSX, is_found_CS[:, :, None]


def network_largest(offer_CX: Tensor, data: Block, limit_C: Tensor | None = None) -> Round[Tensor]:
    """Return the offer with the largest first number; of several, that with the least second.

    Offers whose first number is not below the client's limit do not count.
    """
    if limit_C is not None:
        offer_CX = _without(offer_CX, limit_C)
    first_C1 = torch.zeros(len(data), 1, dtype=torch.long)
    for _ in range(data.diameter):
        answer = yield Exchange(
            first_C1, offer_CX[:, None], data.counts_C[:, None], first_C1, is_model=False
        )
        offer_CX = answer.largest() if limit_C is None else _largest_below(answer, limit_C)
    return offer_CX


def _largest_below(answer: Neighbourhood, limit_C: Tensor) -> Tensor:
    """Return each client's largest offer below its limit: a neighbour may send one above it."""
    offer_NX, found_CX = answer.offers.model_CKP[:, 0], answer.offers.model_CKP.new_empty(0)
    for limit in torch.unique(limit_C):
        allowed_N1X = _without(offer_NX, limit.expand(len(offer_NX)))[:, None]
        best_CX = replace(answer, offers=replace(answer.offers, model_CKP=allowed_N1X)).largest()
        is_own_C1 = (limit_C == limit)[:, None]
        found_CX = torch.where(is_own_C1, best_CX, found_CX) if len(found_CX) else best_CX
    return found_CX


def _without(offer_AX: Tensor, limit_A: Tensor) -> Tensor:
    """Return the offers with a first number of -1 where it is not below the limit."""
    first_A = torch.where(offer_AX[:, 0] < limit_A, offer_AX[:, 0], -1)
    return torch.cat([first_A[:, None], offer_AX[:, 1:]], 1)


# ---- 2.1: probe the head


def balanced_weights(log_prior_CK: Tensor, data: Block) -> Tensor:
    """Return weight_CE = 1 / (K pi_iy): so weighted, all labels of a client come equally often."""
    weight_CE = torch.ones(len(data), data.width, dtype=log_prior_CK.dtype)
    if log_prior_CK.shape[1]:
        for own_E, log_prior_K, y in zip(weight_CE, log_prior_CK, data.y, strict=True):
            own_E[: len(y)] = (-log_prior_K[y]).exp()
    return weight_CE


def move_heads(
    learner: Learner, model_CP: Tensor, only_CFE: Tensor, weight_CE: Tensor, data: Block, key: Key
) -> tuple[Tensor, Tensor]:
    """Return how weight_CFKB and bias_CFK of the head move in an epoch on one fold alone.

    The body stands still, so that all clients see the same features. A head without a bias has
    the sums of its rows instead: where features are positive, they too follow the labels' counts.
    """
    one, updates = learner.split(1), []
    head_W, rates = torch.zeros_like(one.gradient), learner.training.rates(key.round)[:1]
    for part in one.head_slices:
        head_W[part] = 1
    none = model_CP.new_zeros(len(data), one.classes)
    model_CA = one.join(model_CP, model_CP.new_zeros(len(data), 1, one.head_size), none)
    weight_CE1 = weight_CE[:, :, None]
    options: dict[str, Any] = {"rates": rates, "factor_W": head_W, "weight_CE": weight_CE1}
    parts = only_CFE.unbind(1)
    models = [model_CA] * len(parts)
    for trained_CA in one.train_parts(models, data, key.of("fold"), parts, **options):
        updates.append(learner.cut.head(one.separate(trained_CA - model_CA)[0]))
    K, B = one.head_shape
    weight_CFQ, bias_CFK = torch.stack(updates, 1).tensor_split([K * B], 2)
    weight_CFKB = weight_CFQ.reshape(*weight_CFQ.shape[:2], K, B)
    return weight_CFKB, bias_CFK if bias_CFK.shape[2] else weight_CFKB.sum(3)


# ---- 2.2: remove the label counts


def centre_folds(
    weight_CFKB: Tensor, bias_CFK: Tensor, is_used_CF: Tensor, data: Block
) -> Round[Tensor]:
    """Return d_CFQ, how labels and features belong together in a fold; 0 if it has no example.

    To first order the head's row k moves by sum_e g_ek h_e and its bias by sum_e g_ek, with the
    features h_e of example e and the slopes g_ek of its loss. A regression of rows on biases gives
    the mean feature m, and row - bias m = sum_e g_ek (h_e - m). How often each label comes, the
    largest part of what is chance, drops out. One mean serves all folds: they have the same
    expectation.
    """
    own_CFX, used_CF1 = fold_moments(weight_CFKB, bias_CFK), is_used_CF[:, :, None].to(bias_CFK)
    own_CX = divide((own_CFX * used_CF1).sum(1), used_CF1.sum(1))
    mean_C1X = yield from network_mean(own_CX[:, None], data)
    return without_mean_feature(weight_CFKB, bias_CFK, mean_C1X[:, 0]) * used_CF1


def fold_moments(weight_CFKB: Tensor, bias_CFK: Tensor) -> Tensor:
    """Return own_CFX: rows, biases, sums of their products and of the biases' squares."""
    products = (bias_CFK[..., None] * weight_CFKB).sum(2), bias_CFK.square().sum(2, keepdim=True)
    return torch.cat([weight_CFKB.flatten(2), bias_CFK, *products], 2)


def without_mean_feature(weight_CFKB: Tensor, bias_CFK: Tensor, mean_CX: Tensor) -> Tensor:
    """Return the rows' residuals in a regression on the biases, with the moments' means given."""
    K, B = weight_CFKB.shape[2:]
    parts = torch.split(mean_CX, [K * B, K, B, 1], 1)
    weight_CQ, bias_CK, product_CB, square_C1 = parts
    weight_CKB = weight_CQ.reshape(-1, K, B)
    covariance_CB = product_CB - (bias_CK[:, :, None] * weight_CKB).sum(1)
    m_CB = divide(covariance_CB, square_C1 - bias_CK.square().sum(1, keepdim=True))
    row_CFKB = weight_CFKB - weight_CKB[:, None]
    residual_CFKB = row_CFKB - (bias_CFK - bias_CK[:, None])[..., None] * m_CB[:, None, None]
    d_CFQ: Tensor = residual_CFKB.flatten(2)
    return d_CFQ


# ---- 2.3: directions in which clients differ


def find_directions(
    d_CFQ: Tensor, count: int, data: Block, key: Key
) -> Round[tuple[Tensor, Tensor]]:
    """Return V_CMQ and size_CM, every client's own estimate of the leading eigenvectors and values.

    A is the mean of d_f d_g' over the clients and the pairs of different folds, all of length 1. A
    client's part of A v is the mean of (d_g . v) d_f. An eigenvalue's size is the length of A v
    beside the directions before it. Chance has values of both signs. Where it mixes them in one
    direction, v' A v cancels, and this length does not.
    """
    draw = torch.randn(d_CFQ.shape[2], count, generator=key.torch(), dtype=torch.double)
    V_CMQ: Tensor = torch.linalg.qr(draw)[0].T.to(d_CFQ).repeat(len(d_CFQ), 1, 1)
    unit_CFQ = divide(d_CFQ, d_CFQ.norm(dim=2, keepdim=True))
    F, size_CM = unit_CFQ.shape[1], V_CMQ.new_zeros(V_CMQ.shape[:2])
    for _ in range(ITERATIONS):
        along_CFM = _along(V_CMQ, unit_CFQ)
        others_CFM = (along_CFM.sum(1, keepdim=True) - along_CFM) / (F * (F - 1))
        own_CMQ = torch.zeros_like(V_CMQ)
        for f in range(F):
            own_CMQ = own_CMQ + others_CFM[:, f, :, None] * unit_CFQ[:, f, None]
        w_CMQ = yield from network_mean(own_CMQ, data)
        V_CMQ, size_CM = _orthonormalise(w_CMQ)
    return V_CMQ, size_CM


def _along(V_CMQ: Tensor, x_CFQ: Tensor) -> Tensor:
    """Return along_CFM, the coordinates of every fold's vector."""
    folds = [(V_CMQ * x_CFQ[:, f, None]).sum(2) for f in range(x_CFQ.shape[1])]
    return torch.stack(folds, 1)


def _orthonormalise(w_CMQ: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Q of a QR decomposition whose R has a positive diagonal, and this diagonal."""
    q_CQM, r_CMM = torch.linalg.qr(w_CMQ.double().transpose(1, 2))
    diagonal_CM = torch.diagonal(r_CMM, dim1=1, dim2=2)
    sign_CM = torch.where(diagonal_CM < 0, -1.0, 1.0)
    V_CMQ: Tensor = (q_CQM * sign_CM[:, None]).transpose(1, 2).to(w_CMQ).contiguous()
    return V_CMQ, diagonal_CM.abs().to(w_CMQ)


# ---- 2.4: the number of clusters


def choose_clusters(size_CM: Tensor, data: Block, alone_C: Tensor) -> Round[Tensor]:
    """Return clusters_C, one number for the network, by the largest gap between eigenvalues.

    The clients' estimates differ a little, so that one client decides for all.
    """
    own_C, _ = largest_gap(size_CM, data.network_size)
    agreed_C = yield from agree(own_C.to(size_CM), data, alone_C)
    # One may send any number.
    return agreed_C.round().clamp(1, size_CM.shape[1]).long()


def agree(number_C: Tensor, data: Block, alone_C: Tensor) -> Round[Tensor]:
    """Return the number of the client with the lowest id; clients left alone come last."""
    rank_C = torch.tensor(data.clients) + data.network_size * alone_C
    offer_C2 = torch.stack([-rank_C.to(number_C), number_C], 1)
    agreed_C2 = yield from network_largest(offer_C2, data)
    return agreed_C2[:, 1]


def largest_gap(value_CM: Tensor, network_size: int) -> tuple[Tensor, Tensor]:
    """Return S = 1 + the eigenvalues before the largest ratio of two in a row, and this ratio.

    S is 1 if the ratio is below LEAST_RATIO. The ratio is 0 if there are no two eigenvalues.
    """
    usable = min(value_CM.shape[1], network_size - 1)  # N clients span at most N - 1 directions
    if usable < 2:
        return torch.ones(len(value_CM), dtype=torch.long), value_CM.new_zeros(len(value_CM))
    value_CM = value_CM[:, :usable].sort(1, descending=True).values
    ratio_CM = value_CM[:, :-1] / value_CM[:, 1:].clamp(min=NOISE / network_size)
    best = ratio_CM.max(1)
    return torch.where(best.values >= LEAST_RATIO, best.indices + 2, 1), best.values.clamp(min=0)


# ---- 2.5: coordinates


def coordinates(V_CMQ: Tensor, d_CFQ: Tensor) -> Tensor:
    """Return z_CM, the coordinates of every client: the mean over its folds that have examples."""
    count_C1 = (d_CFQ.norm(dim=2) > 0).sum(1, keepdim=True).to(d_CFQ)
    return divide(_along(V_CMQ, d_CFQ).sum(1), count_C1)


# ---- 2.6 and 2.7: corners, and mixtures between them


def find_corners(
    z_CM: Tensor, clusters_C: Tensor, most: int, data: Block, alone_C: Tensor
) -> Round[tuple[Tensor, Tensor]]:
    """Return corner_CSM, the coordinates of the most extreme clients minus their mean, and names.

    Successive projection takes the point of largest norm, projects it out of all, and goes on.
    Coordinates beyond a client's number of clusters are 0, and so are corners. The names are those
    of the labelling: clients that found the same corners have the same.
    """
    M, z_CM = z_CM.shape[1], where_in_use(z_CM, clusters_C)
    scale_C11, is_linear = yield from gossip_mean(z_CM.norm(dim=1)[:, None, None], data)
    rest_CX = torch.cat([z_CM, scale_C11[:, 0]], 1)
    find = _farthest if is_linear else partial(_farthest_confirmed, alone_C=alone_C)
    found = []
    for _ in range(most):
        best = yield from find(rest_CX, z_CM, data)
        point_CX = best[:, 2 : 3 + M]
        along_CX = divide(point_CX, point_CX.norm(dim=1, keepdim=True))
        rest_CX = rest_CX - (rest_CX * along_CX).sum(1, keepdim=True) * along_CX
        found.append(best)
    found_CSX = torch.stack(found, 1)
    corner_CSM = found_CSX[:, :, 3 + M :]
    is_used_CS1 = (torch.arange(most) < clusters_C[:, None])[:, :, None]
    mean_C1M = (corner_CSM * is_used_CS1).sum(1, keepdim=True) / clusters_C[:, None, None]
    labelling_C = name_labelling(found_CSX[:, 0, 0], found_CSX[:, :, 1], clusters_C)
    return torch.where(is_used_CS1, corner_CSM - mean_C1M, 0), labelling_C


def where_in_use(z_CM: Tensor, clusters_C: Tensor) -> Tensor:
    """Return the coordinates, 0 beyond the S - 1 that S clusters need."""
    return torch.where(torch.arange(z_CM.shape[1]) < clusters_C[:, None] - 1, z_CM, 0)


def _farthest(rest_CX: Tensor, z_CM: Tensor, data: Block) -> Round[Tensor]:
    """Return the farthest point: its norm, its client, what is left of it, and its z."""
    return (yield from network_largest(_as_offer(rest_CX, z_CM, data), data))


def _farthest_confirmed(
    rest_CX: Tensor, z_CM: Tensor, data: Block, alone_C: Tensor
) -> Round[Tensor]:
    """Return the farthest point that is near another client's; 0 if ATTEMPTS find none.

    A client that lies about its coordinates is the farthest point, but a lonely one. Clients that
    were left alone have directions of their own, so that their points mean nothing.
    """
    offer_CX, client_C = _as_offer(rest_CX, z_CM, data), torch.tensor(data.clients).to(z_CM)
    offer_CX[:, 0] = torch.where(alone_C, -1, offer_CX[:, 0])
    chosen_CX, is_found_C = torch.zeros_like(offer_CX), torch.zeros(len(data), dtype=torch.bool)
    limit_C = torch.full_like(client_C, torch.inf)
    for _ in range(ATTEMPTS):
        best = yield from network_largest(offer_CX, data, limit_C)
        norm_C, point_CX = best[:, 0], best[:, 2 : 2 + rest_CX.shape[1]]
        is_near_C = (rest_CX - point_CX).norm(dim=1) <= NEAR * norm_C
        is_second_C = is_near_C & ~alone_C & (client_C != best[:, 1]) & (norm_C >= 0)
        second = yield from network_largest(torch.stack([is_second_C.to(z_CM), client_C], 1), data)
        is_new_C = (second[:, 0] > 0) & ~is_found_C
        chosen_CX = torch.where(is_new_C[:, None], best, chosen_CX)
        is_found_C, limit_C = is_found_C | is_new_C, norm_C
    return chosen_CX


def _as_offer(rest_CX: Tensor, z_CM: Tensor, data: Block) -> Tensor:
    about_C2 = torch.stack([rest_CX.norm(dim=1), torch.tensor(data.clients).to(z_CM)], 1)
    return torch.cat([about_C2, rest_CX, z_CM], 1)


def first_mixture(
    z_CM: Tensor, corner_CSM: Tensor, clusters_C: Tensor, data: Block
) -> Round[Tensor]:
    """Return u_CS = softmax(-2 dist^2 / mean dist^2) over the corners."""
    S = corner_CSM.shape[1]
    is_used_CS = torch.arange(S) < clusters_C[:, None]
    z_CM = where_in_use(z_CM, clusters_C)
    distance_CS = (z_CM[:, None] - corner_CSM).square().sum(2)
    own_C = torch.where(is_used_CS, distance_CS, 0).sum(1) / clusters_C
    mean_C11 = yield from network_mean(own_C[:, None, None], data)
    score_CS = -2 * divide(distance_CS, mean_C11[:, 0])
    return score_CS.double().masked_fill(~is_used_CS, -torch.inf).softmax(1)


# ---- the first heads, in the last round of the warm-up


def find_slopes(update_CQ: Tensor, z_CM: Tensor, labelling_C: Tensor, data: Block) -> Round[Tensor]:
    """Return slope_CMQ, how the clients' updates change with each of their coordinates.

    It is a regression by means over the network: of u, z u, z and z^2, with u the direction of a
    client's update.
    """
    Q, norm_C1 = update_CQ.shape[1], update_CQ.norm(dim=1, keepdim=True)
    unit_CQ = divide(update_CQ, norm_C1)
    own_C1X = torch.cat([unit_CQ, norm_C1, torch.zeros_like(norm_C1)], 1)[:, None]
    z_CM1 = z_CM[:, :, None]
    with_z_CMX = torch.cat([z_CM1 * unit_CQ[:, None], z_CM1, z_CM1.square()], 2)
    moments = yield from network_mean(torch.cat([own_C1X, with_z_CMX], 1), data, labelling_C)
    mean_C1Q, norm_C11 = moments[:, :1, :Q], moments[:, :1, Q : Q + 1]
    mean_z_CM1 = moments[:, 1:, Q : Q + 1]
    variance_CM1 = moments[:, 1:, Q + 1 :] - mean_z_CM1.square()
    covariance_CMQ = moments[:, 1:, :Q] - mean_z_CM1 * mean_C1Q
    return divide(covariance_CMQ, variance_CM1) * norm_C11


def as_long_as(V_CQ: Tensor, D_CSQ: Tensor, clusters_C: Tensor) -> Tensor:
    """Return D_CSQ, scaled so that its mean length over the clusters is LENGTH times that of V."""
    length_C = D_CSQ.norm(dim=2).sum(1) / clusters_C
    factor_C = LENGTH * V_CQ.norm(dim=1) / length_C
    return D_CSQ * torch.where(length_C > 0, factor_C, 0)[:, None, None]


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient, and 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator, 0)
