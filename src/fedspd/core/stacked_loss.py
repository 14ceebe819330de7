"""The gradient of a batch's objective by the outputs of stacked models.

Shapes: G clients, B examples of a batch, S heads, K classes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedspd.core.losses import Loss, Objective, cross_entropy, squared_error, weighted_loss

Gradient = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], None]


def output_gradient(example_loss: Loss, loss: Loss, objective: Objective) -> Gradient:
    """Return what writes the gradient of every client's objective by the outputs.

    It takes the outputs [G, B, ...], the targets, the weights, the share of every example in the
    mean of its batch, and the place for the gradient. For the usual losses the gradient is written
    out, as autograd takes longer than all the products of a small model.
    """
    if objective is weighted_loss and example_loss is cross_entropy:
        return cross_entropy_gradient
    if objective is weighted_loss and example_loss is squared_error:
        return squared_error_gradient

    def by_autograd(
        output: Tensor, y: Tensor, weight: Tensor | None, share_GB: Tensor, d: Tensor
    ) -> None:
        with torch.enable_grad():
            rows = output.flatten(0, 1).detach().requires_grad_()
            own_weight = None if weight is None else weight.flatten(0, 1)
            value = objective(loss(rows, y.flatten(0, 1)), own_weight)
            total = (value * share_GB.flatten()).sum()  # of a vector, torch would import sympy
        d.copy_(torch.autograd.grad(total, rows)[0].view_as(output))

    return by_autograd


def cross_entropy_gradient(
    output: Tensor, y_GB: Tensor, weight: Tensor | None, share_GB: Tensor, d: Tensor
) -> None:
    """Write (softmax - one hot) times weight and share.

    The classes come before the examples: torch computes rows of a few classes ten times slower.
    """
    p = output.movedim(-1, 1).contiguous().softmax(1)
    index = y_GB if output.ndim == 3 else y_GB[:, :, None].expand(*output.shape[:3])
    p.scatter_add_(1, index[:, None], p.new_full((1,), -1.0).expand(index[:, None].shape))
    torch.mul(p.movedim(1, -1), _factor(output.ndim - 1, weight, share_GB)[..., None], out=d)


def squared_error_gradient(
    output: Tensor, y: Tensor, weight: Tensor | None, share_GB: Tensor, d: Tensor
) -> None:
    """Write the error times weight and share."""
    has_heads = output.ndim > y.ndim
    error = output - (y.unsqueeze(2) if has_heads else y)
    factor = _factor(3 if has_heads else 2, weight, share_GB)
    torch.mul(error, factor.view(*factor.shape, *[1] * (error.ndim - factor.ndim)), out=d)


def _factor(axes: int, weight: Tensor | None, share_GB: Tensor) -> Tensor:
    """Return weight times share, [G, B] or, if there are heads, [G, B, S] or [G, B, 1]."""
    if axes == 2:
        return share_GB if weight is None else weight * share_GB
    share = share_GB.unsqueeze(2)
    return share if weight is None else weight * share
