"""Means that a neighbour who lies can move only a little (Yin et al., ICML 2018, and Karimireddy et al., ICML 2021).

Every function gives the same bits however many rows it is called with. Whatever is not a number counts as very large.

Shapes: R rows, each the mean of one cluster at one client, H models heard for it, the client's own included where it
offers one, P numbers in a model.
"""

from collections.abc import Callable

import torch
from torch import Tensor

RobustMean = Callable[[Tensor, Tensor], Tensor]  # model_RHP, own_RH -> mean_RP


def median(model_RHP: Tensor, own_RH: Tensor) -> Tensor:
    """Of every coordinate; of an even number the mean of the two in the middle."""
    ordered_RHP, H = model_RHP.sort(1).values, model_RHP.shape[1]
    return (ordered_RHP[:, (H - 1) // 2] + ordered_RHP[:, H // 2]) / 2


def trimmed(model_RHP: Tensor, own_RH: Tensor) -> Tensor:
    """Of every coordinate, the mean without the highest and the lowest quarter: at least one each, where three are heard."""
    ordered_RHP, H = model_RHP.sort(1).values, model_RHP.shape[1]
    dropped = max(1, H // 4) if H >= 3 else 0
    return _sum(ordered_RHP[:, dropped : H - dropped]) / (H - 2 * dropped)


def clipped(model_RHP: Tensor, own_RH: Tensor) -> Tensor:
    """The mean after every difference from the client's own model is shortened to the median length of the differences.

    Whoever offers no model of its own measures from the median. Of an even number of lengths the shorter one in the middle counts.
    """
    rows, H = torch.arange(len(model_RHP), device=model_RHP.device), model_RHP.shape[1]
    present_R = own_RH.any(1)
    base_RP = model_RHP[rows, own_RH.int().argmax(1)]
    if not present_R.all():
        base_RP = torch.where(present_R[:, None], base_RP, median(model_RHP, own_RH))
    apart_RHP = model_RHP - base_RP[:, None]
    length_RH = torch.linalg.vector_norm(apart_RHP, dim=2)
    length_RH = torch.where(length_RH.isfinite(), length_RH, torch.inf)
    others_R = H - present_R.int()
    middle_R = present_R.int() + (others_R - 1).div(2, rounding_mode="floor")
    limit_R = (
        length_RH.masked_fill(own_RH, -1).sort(1).values[rows, middle_R].clamp(min=0)
    )  # one's own comes first
    scale_RH = torch.where(length_RH <= limit_R[:, None], 1, limit_R[:, None] / length_RH)
    moved_RHP = torch.where(length_RH.isfinite()[:, :, None], scale_RH[:, :, None] * apart_RHP, 0)
    return base_RP + _sum(moved_RHP) / H


def _sum(model_RHP: Tensor) -> Tensor:
    """In the order of the senders, whatever the shape."""
    total_RP = model_RHP[:, 0].clone()
    for h in range(1, model_RHP.shape[1]):
        total_RP += model_RHP[:, h]
    return total_RP


ROBUST: dict[str, RobustMean] = {"median": median, "trimmed": trimmed, "clipped": clipped}
