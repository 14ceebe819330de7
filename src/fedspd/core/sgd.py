"""One step of SGD, for one model or for the stacked models of several clients.

Shapes: W trained parameters, of one model [W] or of G clients [G, W].
"""

from torch import Tensor

Scale = float | Tensor  # one number, [G, 1], or one number for every parameter


def sgd_step(
    weights: Tensor,
    gradient: Tensor,
    velocity: Tensor,
    rate: Scale,
    *,
    momentum: float,
    weight_decay: float,
    anchor: Tensor | None = None,
    pull: Scale = 0.0,
) -> None:
    """Update weights and velocity in place, as torch.optim.SGD does."""
    velocity.mul_(momentum).add_(gradient)
    descend(weights, velocity, rate, weight_decay=weight_decay, anchor=anchor, pull=pull)


def descend(
    weights: Tensor,
    velocity: Tensor,
    rate: Scale,
    *,
    weight_decay: float,
    anchor: Tensor | None = None,
    pull: Scale = 0.0,
) -> None:
    """Add the gradient of the penalties to the velocity, and take a step along it, in place.

    An anchor adds pull/2 ||weights - anchor||^2 to the loss.
    """
    if anchor is not None:
        _add_scaled(velocity, weights - anchor, pull)
    if weight_decay:
        velocity.add_(weights, alpha=weight_decay)
    _add_scaled(weights, velocity, -rate)


def _add_scaled(target: Tensor, vector: Tensor, scale: Scale) -> None:
    if isinstance(scale, Tensor):
        target.add_(scale * vector)
    else:
        target.add_(vector, alpha=scale)
