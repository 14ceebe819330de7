"""The models of many clients at once, by torch.func.vmap: how a block trains on a GPU.

On a CPU the loop over clients is as fast.

Shapes: C clients, G of them whose batches have one size, B examples in a batch, S models per
client, P parameters of a model: W that are trained, then Q others (frozen parameters and buffers);
E examples.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedspd.core.block import Block
from fedspd.core.client_dropout import (
    Call,
    ClientDropout,
    draw_masks,
    has_other_random_layers,
)
from fedspd.core.errors import ConfigError
from fedspd.core.losses import Objective
from fedspd.core.sgd import Descent

if TYPE_CHECKING:
    from fedspd.core.learner import Learner, LocalUpdate

Steps = Iterator[tuple[float, Tensor]]  # of one client: learning rate and rows of each batch


class VmapTrainer:
    """Local updates of several clients at once.

    Clients whose batches have the same size take a step together. So no batch is padded, and
    BatchNorm sees the batches that it would see in the loop.
    """

    def __init__(self, learner: "Learner") -> None:
        self.learner, self.dropout = learner, ClientDropout(learner.module)
        self._calls: dict[tuple[int, ...], list[Call]] = {}  # by the shape of a batch
        self.buffer_size = sum(slot.view.numel() for slot in learner.buffer_slots)

    @classmethod
    def build(cls, learner: "Learner") -> "VmapTrainer | None":
        """Return the trainer if the model's random layers draw by client; else a loop trains."""
        if learner.device.type == "cpu" or has_other_random_layers(learner.module):
            return None
        return cls(learner)

    def train(
        self,
        model_CP: Tensor,
        updates: Sequence["LocalUpdate"],
        steps: Sequence[Steps],
        drops: Sequence[torch.Generator],
    ) -> Tensor:
        """Return every client's model after its local update, as the learner's loop does.

        drops   the generator of every client's dropout
        """
        trained_CP = model_CP.to(device=self.learner.device, dtype=self.learner.dtype, copy=True)
        trained_CW = trained_CP[:, : self.learner.weights]
        descent = Descent(updates[0].optimizer, [trained_CW], []) if updates else None
        self.learner.module.train()
        for of_all in zip_longest(*steps):
            for clients_G, rates, batches in _by_batch_size(of_all):
                assert descent is not None
                model_GP, updates_G = trained_CP[clients_G], [updates[c] for c in clients_G]
                gradient_GW, rest_GQ = self._gradients(
                    model_GP, updates_G, batches, [drops[c] for c in clients_G]
                )
                trained_CP[clients_G, self.learner.weights :] = rest_GQ
                own = descent.of(clients_G, [gradient_GW])
                rate_G = torch.tensor(rates, dtype=torch.double).to(model_GP)
                self._step(own, updates_G, rate_G)
                descent.put(clients_G, own)
        return trained_CP

    def _step(self, descent: Descent, updates: list["LocalUpdate"], rate_G: Tensor) -> None:
        anchors = [update.anchor_W for update in updates if update.anchor_W is not None]
        pull_G = torch.tensor([update.pull for update in updates], dtype=torch.double)
        descent.step(
            [updates[0].scale(rate_G[:, None])],
            [torch.stack(anchors)] if anchors else [],
            pull_G.to(rate_G)[:, None],
        )
        self.learner.effort.steps += len(updates)

    def _gradients(
        self,
        model_GP: Tensor,
        updates: list["LocalUpdate"],
        batches: list[Tensor],
        drops: list[torch.Generator],
    ) -> tuple[Tensor, Tensor]:
        learner, W = self.learner, self.learner.weights
        for norm in learner.norms:
            norm.train(len(batches[0]) > 1)
        pairs = list(zip(updates, batches, strict=True))
        x_GB = torch.stack([update.x[batch] for update, batch in pairs])
        y_GB = torch.stack([update.y[batch] for update, batch in pairs])
        weights = [update.weight[batch] for update, batch in pairs if update.weight is not None]
        x_GB = x_GB.to(device=learner.device, dtype=learner.dtype)
        masks = draw_masks(self._dropout_calls(model_GP[0], x_GB[0]), drops, learner.device)
        loss = partial(self._loss, updates[0].objective)
        in_dims = (0, 0, 0, 0, 0 if weights else None, 0)
        gradients = vmap(grad(loss, has_aux=True), in_dims, randomness="error")
        with _random_code_as_sentence():
            gradient_GW, rest_GQ = gradients(
                model_GP[:, :W],
                model_GP[:, W:],
                x_GB,
                y_GB.to(learner.device),
                torch.stack(weights).to(model_GP) if weights else None,
                masks,
            )
        return gradient_GW, rest_GQ

    def _dropout_calls(self, model_P: Tensor, x_B: Tensor) -> list[Call]:
        """Return the uses of dropout layers for a batch of this shape."""
        if not self.dropout.layers:
            return []
        shape = tuple(x_B.shape)
        if shape not in self._calls:
            learner, W = self.learner, self.learner.weights
            tensors = learner.tensors(model_P[:W], model_P[W:])
            self._calls[shape] = self.dropout.calls(
                lambda: functional_call(learner.module, tensors, (x_B,))
            )
        return self._calls[shape]

    def _loss(
        self,
        objective: Objective,
        weights_W: Tensor,
        rest_Q: Tensor,
        x_B: Tensor,
        y_B: Tensor,
        weight_B: Tensor | None,
        masks: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the mean to minimise, and the rest of the vector with the buffers after it."""
        tensors = self.learner.tensors(weights_W, rest_Q)
        with self.dropout.applied(masks):
            output = functional_call(self.learner.module, tensors, (x_B,))
        loss_B = self.learner.loss(output, y_B)
        frozen_Q = rest_Q[: len(rest_Q) - self.buffer_size]
        buffers = [
            tensors[slot.name].reshape(-1).to(rest_Q.dtype) for slot in self.learner.buffer_slots
        ]
        return objective(loss_B, weight_B).mean(), torch.cat([frozen_Q, *buffers])

    @torch.no_grad()
    def losses(self, model_CSP: Tensor, data: Block, batch: int) -> Tensor:
        """Return losses_CSE, as the learner's loop does, by passes of `batch` examples."""
        learner = self.learner
        learner.module.eval()
        losses_CSE = torch.zeros(*model_CSP.shape[:2], data.width, dtype=learner.dtype)
        by_count = defaultdict(list)
        for c, y in enumerate(data.y):
            by_count[len(y)].append(c)
        for count, clients in by_count.items():
            for rows in torch.split(torch.arange(count), batch):
                x_GB = torch.stack([data.x[c][rows] for c in clients])
                y_GB = torch.stack([data.y[c][rows] for c in clients])
                losses_GSB = vmap(vmap(self._losses, (0, None, None)))(
                    model_CSP[clients],
                    x_GB.to(device=learner.device, dtype=learner.dtype),
                    y_GB.to(learner.device),
                )
                losses_CSE[clients, :, rows[0] : rows[-1] + 1] = losses_GSB.cpu()
        return losses_CSE

    def _losses(self, model_P: Tensor, x_B: Tensor, y_B: Tensor) -> Tensor:
        tensors = self.learner.tensors(
            model_P[: self.learner.weights], model_P[self.learner.weights :]
        )
        return self.learner.loss(functional_call(self.learner.module, tensors, (x_B,)), y_B)


@contextmanager
def _random_code_as_sentence() -> Iterator[None]:
    """Refuse a model whose code draws random numbers: they would depend on other clients."""
    try:
        yield
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        raise ConfigError(
            "model.name: the model's code draws random numbers, which on a GPU would depend on the "
            'other clients; expected layers such as nn.Dropout. Use these, or device = "cpu".'
        ) from error


def _by_batch_size(
    of_all: Sequence[tuple[float, Tensor] | None],
) -> Iterator[tuple[list[int], list[float], list[Tensor]]]:
    """Yield clients, learning rates and batches of one step, by batch size; None: no step left."""
    groups: dict[int, list[tuple[int, float, Tensor]]] = defaultdict(list)
    for c, step in enumerate(of_all):
        if step is not None:
            groups[len(step[1])].append((c, *step))
    for group in groups.values():
        clients, rates, batches = zip(*group, strict=True)
        yield list(clients), list(rates), list(batches)
