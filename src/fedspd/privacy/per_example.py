"""The gradient of every example of a batch, by torch.func.

Shapes: B examples of a batch, P parameters of a model: W that are trained, then others.
"""

from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedspd.core.learner import Learner, LocalUpdate
from fedspd.core.losses import Objective

MAX_ELEMENTS = 1 << 24  # of the gradients that are in memory at a time


class PerExampleGradients:
    """Gradients by example: the module sees one example at a time, so that none meets another."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.trained = [slot for slot in learner.parameter_slots if slot.start < learner.weights]
        self.chunk = max(1, MAX_ELEMENTS // max(1, learner.weights))

    def clipped_sum(
        self, model_P: Tensor, update: LocalUpdate, rows: Tensor, clip: float
    ) -> Tensor:
        """Return the sum of the examples' gradients, each of a norm of at most `clip`."""
        learner = self.learner
        sum_W = torch.zeros(learner.weights, dtype=model_P.dtype, device=model_P.device)
        learner.module.train()
        for part in torch.split(rows, self.chunk) if len(rows) else ():
            gradients = self.gradients(model_P, update, part)
            norm_B = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            factor_B = (clip / norm_B).clamp(max=1.0)  # 1 where the norm is 0
            is_finite_B = norm_B.isfinite()
            for slot in self.trained:
                gradient_B = gradients[slot.name]
                if not is_finite_B.all():
                    gradient_B = gradient_B[is_finite_B]
                sum_of_slot = torch.tensordot(factor_B[is_finite_B], gradient_B, 1)
                learner.view(sum_W, slot.start, slot.view).add_(sum_of_slot)
        return sum_W

    def gradients(self, model_P: Tensor, update: LocalUpdate, rows: Tensor) -> dict[str, Tensor]:
        """Return the gradient of the objective at every example, by parameter, each [B, ...].

        By parameter, as a gradient by the flat vector would be filled up with zeros for each.
        """
        learner, W = self.learner, self.learner.weights
        tensors = learner.tensors(model_P[:W], model_P[W:])
        trained = {slot.name: tensors.pop(slot.name) for slot in self.trained}
        weight_B = None if update.weight is None else update.weight[rows].to(model_P)
        in_dims = (None, None, 0, 0, None if weight_B is None else 0)
        loss = partial(self._loss, update.objective)
        gradients: dict[str, Tensor] = vmap(grad(loss), in_dims, randomness="different")(
            trained,
            tensors,
            update.x[rows].to(device=learner.device, dtype=learner.dtype),
            update.y[rows].to(learner.device),
            weight_B,
        )
        return gradients

    def _loss(
        self,
        objective: Objective,
        trained: dict[str, Tensor],
        rest: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
    ) -> Tensor:
        output = functional_call(self.learner.module, {**trained, **rest}, (x[None],))
        loss_1 = self.learner.loss(output, y[None])
        return objective(loss_1, None if weight is None else weight[None]).sum()


def clipped(vector_BW: Tensor, clip: float) -> Tensor:
    """Return the vectors, each shortened to a norm of at most `clip`; 0 where one is not finite."""
    norm_B1 = vector_BW.norm(dim=1, keepdim=True)
    factor_B1 = (clip / norm_B1).clamp(max=1.0)  # 1 where the norm is 0
    return torch.where(norm_B1.isfinite(), vector_BW * factor_B1, 0.0)
