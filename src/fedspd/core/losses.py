"""Losses of examples, and what a weighted batch of them minimises.

Shapes: B examples of a batch.
"""

from collections.abc import Callable

from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
# Losses and weights of a batch (None: all alike) -> what to minimise, of every example.
Objective = Callable[[Tensor, Tensor | None], Tensor]


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy of every example."""
    return nn.functional.cross_entropy(output, y, reduction="none")


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    """Return half the squared error of every example, summed over its values."""
    error = (output - y).square()
    return (error.flatten(1).sum(1) if error.ndim > 1 else error) / 2


def weighted_loss(loss_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return the weighted loss of every example; those of several heads are added up."""
    weighted = loss_B if weight_B is None else loss_B * weight_B
    return weighted if weighted.ndim == 1 else weighted.sum(1)
