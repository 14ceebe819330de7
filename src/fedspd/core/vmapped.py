"""The models of many clients at once, by torch.func.vmap: how a block runs on a GPU. On a CPU the loop is as fast.

Shapes: C clients, G of them whose batches have one size, B examples in a batch, S models per client, P numbers in a
model: W that are trained, then Q others (frozen parameters and buffers); E examples.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedspd.core.block import Block

if TYPE_CHECKING:
    from fedspd.core.learner import Learner, LocalUpdate

Steps = Iterator[tuple[float, Tensor]]  # of one client: learning rate and rows of each batch


class TensorSlot(NamedTuple):
    """Where one tensor of the module lies in the flat vector."""

    name: str
    start: int
    like: Tensor


class VmapTrainer:
    """Clients whose batches have the same size at a step take it together, so no batch is padded and BatchNorm sees what it would alone."""

    def __init__(self, learner: "Learner") -> None:
        self.learner = learner
        path = {
            module: f"{name}." if name else "" for name, module in learner.module.named_modules()
        }
        self.parameters = [
            TensorSlot(name, int(p.storage_offset()), p)
            for name, p in learner.module.named_parameters()
        ]
        self.buffers = [
            TensorSlot(
                path[slot.owner] + slot.name,
                slot.start,
                slot.view.long() if slot.integer else slot.view,
            )
            for slot in learner.buffers
        ]

    def train(
        self, model_CP: Tensor, lessons: Sequence["LocalUpdate"], steps: Sequence[Steps]
    ) -> Tensor:
        """Local SGD of every client's model, as the learner's loop does it."""
        trained_CP = model_CP.to(device=self.learner.device, dtype=self.learner.dtype, copy=True)
        velocity_CW = torch.zeros_like(trained_CP[:, : self.learner.weights])
        self.learner.module.train()
        for at_once in zip_longest(*steps):
            for clients_G, rates, batches in _of_one_size(at_once):
                model_GP, velocity_GW = trained_CP[clients_G], velocity_CW[clients_G]
                lessons_G = [lessons[c] for c in clients_G]
                self._step(
                    model_GP,
                    velocity_GW,
                    lessons_G,
                    torch.tensor(rates, dtype=torch.double).to(model_GP),
                    batches,
                )
                trained_CP[clients_G], velocity_CW[clients_G] = model_GP, velocity_GW
        return trained_CP

    def _step(
        self,
        model_GP: Tensor,
        velocity_GW: Tensor,
        lessons: list["LocalUpdate"],
        rate_G: Tensor,
        batches: list[Tensor],
    ) -> None:
        learner, W = self.learner, self.learner.weights
        weights_GW, momentum = model_GP[:, :W], lessons[0].momentum
        gradient_GW, model_GP[:, W:] = self._gradients(model_GP, lessons, batches)
        if lessons[0].pull is not None:
            anchor_GW = torch.stack([lesson.pull[0] for lesson in lessons if lesson.pull])
            strength_G = torch.tensor(
                [lesson.pull[1] for lesson in lessons if lesson.pull], dtype=torch.double
            ).to(weights_GW)
            gradient_GW += strength_G[:, None] * (weights_GW - anchor_GW)
        gradient_GW += learner.training.weight_decay * weights_GW
        velocity_GW.mul_(momentum).add_(gradient_GW)
        weights_GW.sub_(rate_G[:, None] * velocity_GW)
        learner.steps += len(lessons)

    def _gradients(
        self, model_GP: Tensor, lessons: list["LocalUpdate"], batches: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        learner, W = self.learner, self.learner.weights
        for norm in learner.norms:
            norm.train(len(batches[0]) > 1)
        pairs = list(zip(lessons, batches, strict=True))
        x_GB = torch.stack([lesson.x[batch] for lesson, batch in pairs]).to(
            device=learner.device, dtype=learner.dtype
        )
        y_GB = torch.stack([lesson.y[batch] for lesson, batch in pairs]).to(learner.device)
        ones = torch.ones(len(batches[0]), dtype=learner.dtype)
        weight_GB = torch.stack(
            [ones if lesson.weight is None else lesson.weight[batch] for lesson, batch in pairs]
        ).to(model_GP)
        gradients = vmap(grad(self._loss, has_aux=True), randomness="different")
        gradient_GW, rest_GQ = gradients(model_GP[:, :W], model_GP[:, W:], x_GB, y_GB, weight_GB)
        return gradient_GW, rest_GQ

    def _loss(
        self, weights_W: Tensor, rest_Q: Tensor, x_B: Tensor, y_B: Tensor, weight_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mean loss, and what the pass made of the buffers."""
        tensors = self._tensors(weights_W, rest_Q)
        loss_B = self.learner.loss(functional_call(self.learner.module, tensors, (x_B,)), y_B)
        kept_Q = rest_Q[
            : self.learner.size - len(weights_W) - sum(place.like.numel() for place in self.buffers)
        ]
        buffers = [tensors[place.name].reshape(-1).to(rest_Q.dtype) for place in self.buffers]
        return (loss_B * weight_B).mean(), torch.cat([kept_Q, *buffers])

    def _tensors(self, weights_W: Tensor, rest_Q: Tensor) -> dict[str, Tensor]:
        """One model under the names of its tensors. Buffers are copies, as a pass may write into them."""
        view, W = self.learner.view, len(weights_W)
        tensors = {
            name: view(weights_W, at, like) if at < W else view(rest_Q, at - W, like)
            for name, at, like in self.parameters
        }
        for name, at, like in self.buffers:
            value = rest_Q[at - W : at - W + like.numel()].view(like.shape)
            tensors[name] = (
                value.clone() if like.is_floating_point() else value.round().to(like.dtype)
            )
        return tensors

    @torch.no_grad()
    def losses(self, model_CSP: Tensor, data: Block, at_once: int) -> Tensor:
        """losses_CSE, as the learner's loop gives them; `at_once` examples of each client in a pass."""
        learner = self.learner
        learner.module.eval()
        losses_CSE = torch.zeros(*model_CSP.shape[:2], data.width, dtype=learner.dtype)
        by_count = defaultdict(list)
        for c, y in enumerate(data.y):
            by_count[len(y)].append(c)
        for count, clients in by_count.items():
            for rows in torch.split(torch.arange(count), at_once):
                x_GB = torch.stack([data.x[c][rows] for c in clients]).to(
                    device=learner.device, dtype=learner.dtype
                )
                y_GB = torch.stack([data.y[c][rows] for c in clients]).to(learner.device)
                losses_GSB = vmap(vmap(self._losses, (0, None, None)))(
                    model_CSP[clients], x_GB, y_GB
                )
                losses_CSE[clients, :, rows[0] : rows[-1] + 1] = losses_GSB.cpu()
        return losses_CSE

    def _losses(self, model_P: Tensor, x_B: Tensor, y_B: Tensor) -> Tensor:
        tensors = self._tensors(model_P[: self.learner.weights], model_P[self.learner.weights :])
        return self.learner.loss(functional_call(self.learner.module, tensors, (x_B,)), y_B)


def _of_one_size(
    at_once: Sequence[tuple[float, Tensor] | None],
) -> Iterator[tuple[list[int], list[float], list[Tensor]]]:
    """Clients, learning rates and batches of a step, apart by the size of the batch; None: the client has no step left."""
    groups: dict[int, list[tuple[int, float, Tensor]]] = defaultdict(list)
    for c, step in enumerate(at_once):
        if step is not None:
            groups[len(step[1])].append((c, *step))
    for group in groups.values():
        yield (
            [c for c, _, _ in group],
            [rate for _, rate, _ in group],
            [batch for _, _, batch in group],
        )
