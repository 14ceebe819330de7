"""Whether populations that were found are worth a head each.

Clients may differ in how labels follow from features, or in the features. Where the features tell
the populations apart, one model can learn them all. It then learns from all examples of a client,
which is better than heads that divide them, unless a client belongs to a single population anyway.
So a split is kept in two cases: the features do not change along the clients' coordinates, or the
clients gather at the corners. Label skew changes the features too, and mixes them.

For the same reason clusters share one body where the features do not change: it learns from all.

Under a robust rule the mean of products is not their mean product, so that no variance follows from
it. Clients then take robust means of differences to a point that they agree on: the middle of the
clusters' robust centres, which is between them whatever their sizes.

Shapes: C clients, F folds, E examples, B inputs of a head, M coordinates, S clusters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedspd.algorithms.populations import (
    agree,
    divide,
    mean_by_cluster,
    network_mean,
    where_in_use,
)
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.learner import Learner
from fedspd.core.ledger import NO_CLUSTER

EXPLAINED = 0.06  # of the coordinates' variance, which features must explain beyond chance,
CHANCE = 2.5  # and in 1 / N what they may explain by chance
GATHERED = 0.87  # share of the coordinates' variance that lies between the clusters of a split


class Verdict(NamedTuple):
    """Whether each of the populations that were found is worth a head, and a body."""

    is_kept_C: Tensor  # worth a head
    has_own_bodies_C: Tensor  # worth a body too, in the second half of the rounds

    @classmethod
    def of_all(cls, clients: int) -> "Verdict":
        """Return the verdict without a check."""
        yes_C = torch.ones(clients, dtype=torch.bool)
        return cls(yes_C, yes_C)


def judge_split(
    feature_C2B: Tensor,
    z_CM: Tensor,
    mixture_CS: Tensor,
    clusters_C: Tensor,
    data: Block,
    alone_C: Tensor,
    is_robust: bool,
) -> Round[Verdict]:
    """Return what each population is worth; one client decides for all.

    A head, unless features tell populations apart that clients mix; a body, where features do.
    """
    z_CM = where_in_use(z_CM, clusters_C)
    if is_robust:
        signs = robust_signs(feature_C2B, z_CM, mixture_CS, clusters_C, data, alone_C)
        r_C, gathered_C = yield from signs
    else:
        r_C = yield from correlation_with_features(feature_C2B, z_CM, data)
        gathered_C = yield from share_between_clusters(z_CM, mixture_CS, clusters_C, data)
    differ_C = r_C.clamp(min=0).square() >= EXPLAINED + CHANCE / data.network_size
    is_kept_C = ~differ_C | (gathered_C >= GATHERED)
    code_C = (is_kept_C + 2 * differ_C).to(z_CM)  # both answers as one number
    agreed_C = (yield from agree(code_C, data, alone_C)).round().clamp(0, 3).long()
    return Verdict((agreed_C & 1).bool(), (agreed_C & 2).bool())


def features_of_halves(learner: Learner, model_CP: Tensor, only_CFE: Tensor, data: Block) -> Tensor:
    """Return feature_C2B, the mean features of the even and the odd folds; NaN without examples."""
    rows = []
    for model_P, only_FE, x in zip(model_CP, only_CFE, data.x, strict=True):
        half_2E = torch.stack([only_FE[::2].any(0), only_FE[1::2].any(0)])[:, : len(x)]
        weight_2E = half_2E.to(model_P)
        rows.append(weight_2E @ learner.features(model_P, x) / weight_2E.sum(1, keepdim=True))
    return torch.stack(rows)


def correlation_with_features(feature_C2B: Tensor, z_CM: Tensor, data: Block) -> Round[Tensor]:
    """Return how the coordinates correlate with the features that change along them.

    One half of the examples says in which direction features change, the other half is measured in
    this direction, and the other way round. So chance has a correlation of about 0, with a standard
    error of 1 / sqrt(N). Clients that lack a half do not count.
    """
    count_C1 = feature_C2B.isfinite().all(2).all(1, keepdim=True).to(z_CM)
    feature_C2B = torch.where(count_C1[:, :, None] > 0, feature_C2B, 0)
    z_CM = z_CM * count_C1
    own_C1X = torch.cat([feature_C2B.flatten(1), count_C1], 1)[:, None]
    with_z_CMX = z_CM[:, :, None] * own_C1X
    moments = yield from network_mean(torch.cat([own_C1X, with_z_CMX], 1), data)
    mean_CMX = divide(moments, moments[:, :1, -1:])
    mean_C1X, with_z_CMX = mean_CMX[:, :1], mean_CMX[:, 1:]
    slope_CMX = with_z_CMX[..., :-1] - with_z_CMX[..., -1:] * mean_C1X[..., :-1]
    along_C2M = along_other_half(slope_CMX, feature_C2B)
    return (yield from pooled_correlation(along_C2M, z_CM, count_C1[:, 0], data))


def along_other_half(slope_CMX: Tensor, feature_C2B: Tensor) -> Tensor:
    """Return along_C2M, each half's features in the direction in which the other half changes."""
    slope_C2MB = torch.stack(slope_CMX.chunk(2, dim=2), 1)
    direction_C2MB = divide(slope_C2MB, slope_C2MB.norm(dim=(2, 3), keepdim=True)).flip(1)
    return (direction_C2MB * feature_C2B[:, :, None]).sum(3)


def pooled_correlation(
    along_C2M: Tensor, z_CM: Tensor, count_C: Tensor, data: Block
) -> Round[Tensor]:
    """Return the mean over halves of sum_m cov(z_m, along_m) / sum_m sd(z_m) sd(along_m)."""
    z_C2M = z_CM[:, None].expand_as(along_C2M) * count_C[:, None, None]
    along_C2M = along_C2M * count_C[:, None, None]
    products = (z_C2M, along_C2M, z_C2M.square(), along_C2M.square(), z_C2M * along_C2M)
    own_CX = torch.cat([count_C[:, None], *(one.flatten(1) for one in products)], 1)
    moments_C1X = yield from network_mean(own_CX[:, None], data)
    mean_CX = divide(moments_C1X[:, 0, 1:], moments_C1X[:, 0, :1])
    z, along, z2, along2, product = mean_CX.view(len(mean_CX), 5, *along_C2M.shape[1:]).unbind(1)
    spread_C2M = ((z2 - z.square()).clamp(min=0) * (along2 - along.square()).clamp(min=0)).sqrt()
    return divide((product - z * along).sum(2), spread_C2M.sum(2)).mean(1)


def share_between_clusters(
    z_CM: Tensor, mixture_CS: Tensor, clusters_C: Tensor, data: Block
) -> Round[Tensor]:
    """Return the adjusted R2 of the coordinates on the clients' largest clusters."""
    S = mixture_CS.shape[1]
    member_CS1 = torch.nn.functional.one_hot(mixture_CS.argmax(1), S).to(z_CM)[:, :, None]
    own_C1X = torch.cat([torch.ones_like(z_CM[:, :1]), z_CM, z_CM.square()], 1)[:, None]
    moments = yield from network_mean(member_CS1 * own_C1X, data)
    sizes = [1, z_CM.shape[1], z_CM.shape[1]]
    share_CS1, sum_CSM, square_CSM = torch.split(moments, sizes, 2)
    square_C = square_CSM.sum((1, 2))
    total_C = square_C - sum_CSM.sum(1).square().sum(1)
    within_C = square_C - divide(sum_CSM.square(), share_CS1).sum((1, 2))
    return adjusted_share(within_C, total_C, clusters_C, data.network_size)


def adjusted_share(within_C: Tensor, total_C: Tensor, clusters_C: Tensor, N: int) -> Tensor:
    """Return the adjusted R2 of S clusters of N clients; 0 if it is not defined."""
    freedom_C = (N - clusters_C).clamp(min=1) / (N - 1) if N > 1 else torch.ones_like(total_C)
    found_C = 1 - divide(within_C, total_C * freedom_C)
    return torch.where((total_C > 0) & (clusters_C < N), found_C, 0)


def robust_signs(
    feature_C2B: Tensor,
    z_CM: Tensor,
    mixture_CS: Tensor,
    clusters_C: Tensor,
    data: Block,
    alone_C: Tensor,
) -> Round[tuple[Tensor, Tensor]]:
    """Return the correlation and the share between clusters under a robust rule.

    Clients without a half, and those that were left alone, do not count.
    """
    S, M, B = mixture_CS.shape[1], z_CM.shape[1], feature_C2B.shape[2]
    own_CX = torch.cat([z_CM, feature_C2B.flatten(1)], 1)
    counts_C = own_CX.isfinite().all(1) & ~alone_C
    own_CX = torch.where(counts_C[:, None], own_CX, 0)
    cluster_C, all_C = mixture_CS.argmax(1), torch.where(counts_C, 0, NO_CLUSTER)
    offered_C = torch.where(counts_C, cluster_C, NO_CLUSTER)
    centre_CSX, is_found_CS1 = yield from mean_by_cluster(own_CX, offered_C, S, data)
    middle_CX = divide((centre_CSX * is_found_CS1).sum(1), is_found_CS1.sum(1))
    own_centre_CM = centre_CSX[torch.arange(len(data)), cluster_C, :M]
    within_CM = (z_CM - own_centre_CM).square()
    z_CM, feature_CY = (own_CX - middle_CX).tensor_split([M], 1)
    with_z_CX = (z_CM[:, :, None] * feature_CY[:, None]).flatten(1)
    slope_C1X, _ = yield from mean_by_cluster(with_z_CX, all_C, 1, data)
    along_C2M = along_other_half(slope_C1X.view(len(data), M, -1), feature_CY.view(-1, 2, B))
    z_C2M = z_CM[:, None].expand_as(along_C2M)
    products = (z_C2M * along_C2M, z_C2M.square(), along_C2M.square())
    own_CX = torch.cat([one.flatten(1) for one in (*products, within_CM)], 1)
    mean_C1X, _ = yield from mean_by_cluster(own_CX, all_C, 1, data)
    mean_CX, within_CM = mean_C1X[:, 0].tensor_split([6 * M], 1)
    product, z2, along2 = mean_CX.view(-1, 3, 2, M).unbind(1)
    r_C = divide(product.sum(2), (z2 * along2).sqrt().sum(2)).mean(1)
    total_C = z2[:, 0].sum(1)
    return r_C, adjusted_share(within_CM.sum(1), total_C, clusters_C, data.network_size)
