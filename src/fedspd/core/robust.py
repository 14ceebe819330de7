"""Robust means, which a Byzantine neighbour can move only a little.

After Yin et al., ICML 2018, and Karimireddy et al., ICML 2021. The bits of a row do not depend on
the number of rows. A value that is not a number counts as very large.

Shapes: R rows, each the mean of one cluster at one client; H models received for it, including the
client's own where it offers one; P parameters of a model.
"""

from collections.abc import Callable

import torch
from torch import Tensor

RobustMean = Callable[[Tensor, Tensor], Tensor]  # model_RHP, own_RH -> mean_RP
MIN_VOICES = 3  # of two models no rule can tell which one is false


def aggregate(rule: str, model_RHP: Tensor, own_RH: Tensor) -> Tensor:
    """Return the mean by a robust rule; with fewer than three models, the client's own one."""
    if model_RHP.shape[1] >= MIN_VOICES:
        return ROBUST[rule](model_RHP, own_RH)
    mean_RP = _sum(model_RHP) / model_RHP.shape[1]  # a newcomer has no model to keep
    own_RP = model_RHP[torch.arange(len(model_RHP)), own_RH.int().argmax(1)]
    return torch.where(own_RH.any(1)[:, None], own_RP, mean_RP)


def median(model_RHP: Tensor, own_RH: Tensor) -> Tensor:
    """Return the median of every coordinate; of an even number, the mean of the middle two."""
    ordered_RHP, H = model_RHP.sort(1).values, model_RHP.shape[1]
    return (ordered_RHP[:, (H - 1) // 2] + ordered_RHP[:, H // 2]) / 2


def trimmed(model_RHP: Tensor, own_RH: Tensor) -> Tensor:
    """Return the mean of every coordinate without its highest and lowest quarter, at least one."""
    ordered_RHP, H = model_RHP.sort(1).values, model_RHP.shape[1]
    dropped = max(1, H // 4)
    return _sum(ordered_RHP[:, dropped : H - dropped]) / (H - 2 * dropped)


def clipped(model_RHP: Tensor, own_RH: Tensor) -> Tensor:
    """Return the mean after clipping each difference from the client's own model.

    Differences are clipped to their median length; of an even number of lengths, to the shorter of
    the middle two. A client that offers no model measures from the median.
    """
    rows, H = torch.arange(len(model_RHP), device=model_RHP.device), model_RHP.shape[1]
    has_own_R = own_RH.any(1)
    base_RP = model_RHP[rows, own_RH.int().argmax(1)]
    if not has_own_R.all():
        base_RP = torch.where(has_own_R[:, None], base_RP, median(model_RHP, own_RH))
    difference_RHP = model_RHP - base_RP[:, None]
    length_RH = torch.linalg.vector_norm(difference_RHP, dim=2)
    length_RH = torch.where(length_RH.isfinite(), length_RH, torch.inf)
    others_R = H - has_own_R.int()
    middle_R = has_own_R.int() + (others_R - 1).div(2, rounding_mode="floor")
    ordered_RH = length_RH.masked_fill(own_RH, -1).sort(1).values  # the own model comes first
    limit_R1 = ordered_RH[rows, middle_R][:, None]
    scale_RH = torch.where(length_RH <= limit_R1, 1, limit_R1 / length_RH)
    is_finite_RH1 = length_RH.isfinite()[:, :, None]
    clipped_RHP = torch.where(is_finite_RH1, scale_RH[:, :, None] * difference_RHP, 0)
    return base_RP + _sum(clipped_RHP) / H


def _sum(model_RHP: Tensor) -> Tensor:
    """Return the sum in the order of the senders, for every shape."""
    total_RP = model_RHP[:, 0].clone()
    for h in range(1, model_RHP.shape[1]):
        total_RP += model_RHP[:, h]
    return total_RP


ROBUST: dict[str, RobustMean] = {"median": median, "trimmed": trimmed, "clipped": clipped}
