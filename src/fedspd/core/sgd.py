"""One step of an optimiser, for one model or for the stacked models of several clients.

What an optimiser remembers starts at 0 in every local update, and never leaves the client.

Shapes: W trained parameters, of one model [W] or of G clients [G, W], in one table or in several.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Factor = float | Tensor  # one number, [G, 1], or one number for every parameter
Tables = list[Tensor]
OptimizerName = Literal["sgd", "adamw"]
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of AdamW, as in torch.optim.AdamW


@dataclass(frozen=True)
class Optimizer:
    """How a gradient becomes a step: torch.optim.SGD or torch.optim.AdamW.

    clip   the largest norm of a client's gradient of the loss, without penalties; None: any
    """

    name: OptimizerName = "sgd"
    momentum: float = 0.0  # of SGD
    weight_decay: float = 0.0
    clip: float | None = None

    @property
    def adds_up(self) -> bool:
        """Whether a pass may add its gradient to the velocity, which loses 1 - momentum."""
        return self.name == "sgd" and self.clip is None


class Descent:
    """The steps of a local update: trained parameters, their gradient and the optimiser's memory.

    velocity   the momentum of SGD, or the first moments of AdamW; the gradient's own tables if
               passes add to them
    second     the second moments of AdamW
    powers     the powers of both betas after the steps taken, [..., 1]
    """

    def __init__(
        self, optimizer: Optimizer, weights: Tables, gradient: Tables, adds_up: bool = False
    ) -> None:
        self.optimizer, self.weights, self.gradient = optimizer, weights, gradient
        self.velocity = gradient if adds_up else [torch.zeros_like(table) for table in weights]
        self.second: Tables = []
        self.powers: Tables = []
        if optimizer.name == "adamw":
            self.second = [torch.zeros_like(table) for table in weights]
            shape = (*weights[0].shape[:-1], 1)
            self.powers = [weights[0].new_ones(shape, dtype=torch.double) for _ in BETAS]

    def reset(self) -> None:
        """Forget all steps."""
        separate = [] if self.velocity is self.gradient else self.velocity
        for table in (*self.gradient, *separate, *self.second):
            table.zero_()
        for power in self.powers:
            power.fill_(1)

    def expect_gradient(self) -> None:
        """Prepare the tables to which the next pass adds its gradient."""
        for table in self.gradient:
            if self.velocity is self.gradient:
                table.mul_(self.optimizer.momentum)
            else:
                table.zero_()

    def of(self, rows: slice | list[int], gradient: Tables | None = None) -> "Descent":
        """Return the descent of some clients: views of a slice, copies of a list."""
        own = object.__new__(Descent)
        own.optimizer = self.optimizer
        own.gradient = [table[rows] for table in self.gradient] if gradient is None else gradient
        adds_up = self.velocity is self.gradient
        own.velocity = own.gradient if adds_up else [table[rows] for table in self.velocity]
        own.weights = [table[rows] for table in self.weights]
        own.second = [table[rows] for table in self.second]
        own.powers = [table[rows] for table in self.powers]
        return own

    def put(self, rows: list[int], own: "Descent") -> None:
        """Take the weights and the memory of some clients, which were copies."""
        for name in ("weights", "velocity", "second", "powers"):
            for table, new in zip(getattr(self, name), getattr(own, name), strict=True):
                table[rows] = new

    def step(self, rates: list[Factor], anchors: Tables, pull: Factor = 0.0) -> None:
        """Take one step in place, with the learning rates of each table.

        Anchors add pull/2 ||weights - anchors||^2 to the loss; there may be none.
        """
        if self.optimizer.clip is not None:
            clip_gradient(self.gradient, rates, self.optimizer.clip)
        for power, beta in zip(self.powers, BETAS, strict=False):
            power.mul_(beta)
        for number, weights in enumerate(self.weights):
            anchor = anchors[number] if anchors else None
            if self.optimizer.name == "adamw":
                self._step_adamw(number, weights, rates[number], anchor, pull)
                continue
            velocity = self.velocity[number]
            if velocity is not self.gradient[number]:
                velocity.mul_(self.optimizer.momentum).add_(self.gradient[number])
            decay = self.optimizer.weight_decay
            descend(weights, velocity, rates[number], weight_decay=decay, anchor=anchor, pull=pull)

    def _step_adamw(
        self, number: int, weights: Tensor, rate: Factor, anchor: Tensor | None, pull: Factor
    ) -> None:
        gradient, first, second = self.gradient[number], self.velocity[number], self.second[number]
        if anchor is not None:
            _add_scaled(gradient, weights - anchor, pull)
        if self.optimizer.weight_decay:
            weights.mul_(1 - rate * self.optimizer.weight_decay)
        first.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        # the moments started at 0: early ones are too small by these factors
        short, root = (1 - self.powers[0]).to(weights), (1 - self.powers[1]).sqrt().to(weights)
        weights.sub_(rate * (first / short) / (second.sqrt().div_(root).add_(EPSILON)))


def clip_gradient(gradient: Tables, rates: list[Factor], clip: float) -> None:
    """Scale every client's gradient down to the norm `clip`; what is not trained does not count."""
    square: Tensor | None = None
    for table, rate in zip(gradient, rates, strict=True):
        own = table if isinstance(rate, float) or rate.shape[-1] == 1 else table * (rate != 0)
        part = own.square().sum(-1, keepdim=True)
        square = part if square is None else square + part
    if square is not None:
        factor = (clip / (square.sqrt() + 1e-6)).clamp_(max=1.0)  # as torch does
        for table in gradient:
            table.mul_(factor)


def descend(
    weights: Tensor,
    velocity: Tensor,
    rate: Factor,
    *,
    weight_decay: float,
    anchor: Tensor | None,
    pull: Factor,
) -> None:
    """Add the gradient of the penalties to the velocity, and take a step along it, in place.

    An anchor adds pull/2 ||weights - anchor||^2 to the loss.
    """
    if anchor is not None:
        _add_scaled(velocity, weights - anchor, pull)
    if weight_decay:
        velocity.add_(weights, alpha=weight_decay)
    _add_scaled(weights, velocity, -rate)


def _add_scaled(target: Tensor, vector: Tensor, scale: Factor) -> None:
    if isinstance(scale, Tensor):
        target.add_(scale * vector)
    else:
        target.add_(vector, alpha=scale)
