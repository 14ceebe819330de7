"""Local-only training: the baseline without collaboration.

Shapes: C clients, P parameters of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedspd.core.algorithm import Algorithm, Observation, Round
from fedspd.core.block import Block
from fedspd.core.exchange import Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner


@dataclass(frozen=True)
class State:
    model_CP: Tensor  # x_i
    loss_C: Tensor  # mean loss over the client's own examples


@dataclass(frozen=True)
class Local(Algorithm[State]):
    """Local-only training."""

    EXAMPLES_MEET: ClassVar[str | None] = None
    HAS_PAID_PERSONAL_MODEL: ClassVar[bool] = True
    HAS_PUBLIC_ANNOUNCEMENTS: ClassVar[bool] = True
    UNUSED_KEYS: ClassVar[tuple[str, ...]] = ("clusters", "topology", "exchange")

    clusters: int = 1

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        model_CP = learner.draw(key.of("model", 0)).repeat(len(data), 1)
        return State(model_CP, torch.full((len(data),), torch.nan))

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        return with_loss(learner, learner.train(state.model_CP, data, key.of("train", 0)), data)
        yield  # makes it a generator, which asks for nothing

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        return learner.predict(state.model_CP, x)

    def observe(self, state: State) -> Observation:
        return Observation(loss_C=state.loss_C, model_CP=state.model_CP)

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        """Share nothing."""
        return torch.zeros(len(state.model_CP), 0, dtype=torch.long), state.model_CP[:, None][:, :0]

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        """Train for as many rounds as the other clients did."""
        state = self.begin(learner, data, key)
        for t in range(1, key.round + 1):
            train_key = key.at(t).of("train", 0)
            state = with_loss(learner, learner.train(state.model_CP, data, train_key), data)
        return state


def with_loss(learner: Learner, model_CP: Tensor, data: Block) -> State:
    """Return the state of these models, with their loss."""
    return State(model_CP, learner.mean_losses(model_CP, data))
