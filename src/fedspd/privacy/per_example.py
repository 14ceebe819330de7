"""The gradient of every example of a batch, by torch.func.

Shapes: B examples of a batch, P parameters of a model: W that are trained, then Q others.
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
        self.chunk = max(1, MAX_ELEMENTS // max(1, learner.weights))

    def clipped_sum(
        self, model_P: Tensor, update: LocalUpdate, rows: Tensor, clip: float
    ) -> Tensor:
        """Return the sum of the examples' gradients, each of a norm of at most `clip`."""
        sum_W = torch.zeros(self.learner.weights, dtype=model_P.dtype, device=model_P.device)
        self.learner.module.train()
        for part in torch.split(rows, self.chunk) if len(rows) else ():
            gradient_BW = self.gradients(model_P, update, part)
            sum_W += clipped(gradient_BW, clip).sum(0)
        return sum_W

    def gradients(self, model_P: Tensor, update: LocalUpdate, rows: Tensor) -> Tensor:
        """Return gradient_BW of the objective at every example."""
        learner, W = self.learner, self.learner.weights
        loss = partial(self._loss, update.objective)
        weight_B = None if update.weight is None else update.weight[rows].to(model_P)
        in_dims = (None, None, 0, 0, None if weight_B is None else 0)
        gradients: Tensor = vmap(grad(loss), in_dims, randomness="different")(
            model_P[:W],
            model_P[W:],
            update.x[rows].to(device=learner.device, dtype=learner.dtype),
            update.y[rows].to(learner.device),
            weight_B,
        )
        return gradients

    def _loss(
        self,
        objective: Objective,
        weights_W: Tensor,
        rest_Q: Tensor,
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
    ) -> Tensor:
        tensors = self.learner.tensors(weights_W, rest_Q)
        output = functional_call(self.learner.module, tensors, (x[None],))
        loss_1 = self.learner.loss(output, y[None])
        return objective(loss_1, None if weight is None else weight[None]).sum()


def clipped(vector_BW: Tensor, clip: float) -> Tensor:
    """Return the vectors, each shortened to a norm of at most `clip`; 0 where one is not finite."""
    norm_B1 = vector_BW.norm(dim=1, keepdim=True)
    factor_B1 = (clip / norm_B1).clamp(max=1.0)  # 1 where the norm is 0
    return torch.where(norm_B1.isfinite(), vector_BW * factor_B1, 0.0)
