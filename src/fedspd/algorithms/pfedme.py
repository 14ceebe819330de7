"""pFedMe: personal models by Moreau envelopes (T. Dinh et al.; NeurIPS 2020).

Personalized Federated Learning with Moreau Envelopes. The network agrees on w; each client predicts
with theta, which fits its own examples and stays near w.

Shapes: C clients, P parameters of a model, E examples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedspd.core.algorithm import Algorithm, Observation, Round
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner


@dataclass(frozen=True)
class State:
    model_CP: Tensor  # w_i
    personal_CP: Tensor  # theta_i
    loss_C: Tensor  # mean loss of theta_i


@dataclass(frozen=True)
class PFedMe(Algorithm[State]):
    """A shared model w and a personal model theta at every client."""

    EXAMPLES_MEET: ClassVar[str | None] = "the batches, which the method draws itself"
    UNUSED_KEYS: ClassVar[tuple[str, ...]] = ("clusters",)

    clusters: int = 1
    K: Annotated[int, Field(ge=1, description="The gradient steps on theta per batch.")] = 5
    R: Annotated[
        int | None,
        Field(
            ge=1,
            description="The batches in a round. By default, a round has as many gradient steps as "
            "with the other methods.",
        ),
    ] = None
    lambda_: Annotated[
        float, Field(gt=0, alias="lambda", description="The weight of the proximal term.")
    ] = 15.0
    personal_lr: Annotated[float, Field(gt=0, description="The learning rate of theta.")] = 0.01
    beta: Annotated[
        float, Field(gt=0, description="The step of w towards the mean of the neighbourhood.")
    ] = 1.0

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        model_CP = learner.draw(key.of("model", 0)).repeat(len(data), 1)
        return State(model_CP, model_CP, torch.full((len(data),), torch.nan))

    def check_learner(self, learner: Learner) -> None:
        name = learner.training.optimizer
        if name != "sgd":
            raise ConfigError(
                f"training.optimizer = '{name}': pFedMe takes gradient steps of its own, with "
                "pfedme.personal_lr; expected sgd. Leave pfedme out, or set training.optimizer."
            )

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        w_CP, theta_CP = self.local_update(learner, state.model_CP, data, key)
        only_C1 = torch.zeros(len(data), 1, dtype=torch.long)
        neighbourhood = yield Exchange(only_C1, w_CP[:, None], data.counts_C[:, None], only_C1)
        mean_CP = neighbourhood.mean(only_C1).model_CMP[:, 0]
        w_CP = towards(learner, state.model_CP, mean_CP, self.beta)  # (1 - beta) w_i + beta mean
        return with_loss(learner, w_CP, theta_CP, data)

    def local_update(
        self, learner: Learner, w_CP: Tensor, data: Block, key: Key
    ) -> tuple[Tensor, Tensor]:
        """Return w and theta after R times: theta near w for one batch, then w towards theta."""
        theta_CP, eta = w_CP, learner.training.rate(key.round)
        for r in range(self.R or self.default_R(learner, data, key)):
            batch_CE = draw_batches(learner, data, key.of("batch", r))
            theta_CP = self.solve(learner, theta_CP, w_CP, data, batch_CE, key.of("train", r))
            w_CP = towards(learner, w_CP, theta_CP, eta * self.lambda_)
        return w_CP, theta_CP

    def solve(
        self,
        learner: Learner,
        theta_CP: Tensor,
        w_CP: Tensor,
        data: Block,
        batch_CE: Tensor,
        key: Key,
    ) -> Tensor:
        """Return theta after K steps on f(theta) + lambda/2 ||theta - w||^2 over one batch."""
        return learner.train(
            theta_CP,
            data,
            key,
            rates=[self.personal_lr] * self.K,
            only_CE=batch_CE,
            anchor_CP=w_CP,
            pull_C=torch.full((len(data),), self.lambda_),
            momentum=0.0,
        )

    def default_R(self, learner: Learner, data: Block, key: Key) -> int:
        """Return R for as many gradient steps as the largest client makes in its local epochs."""
        batches = math.ceil(data.width / learner.training.batch)
        return math.ceil(len(learner.training.rates(key.round)) * batches / self.K)

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        return learner.predict(state.personal_CP, x)

    def observe(self, state: State) -> Observation:
        return Observation(loss_C=state.loss_C, model_CP=state.personal_CP)

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(state.model_CP), 1, dtype=torch.long), state.model_CP[:, None]

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        own_C1P = self.begin(learner, data, key).model_CP[:, None]
        w_CP = neighbourhood.average_centers(own_C1P)[:, 0]
        _, theta_CP = self.local_update(learner, w_CP, data, key)
        return with_loss(learner, w_CP, theta_CP, data)


def with_loss(learner: Learner, w_CP: Tensor, theta_CP: Tensor, data: Block) -> State:
    """Return the state of these models, with the loss of theta."""
    return State(w_CP, theta_CP, learner.mean_losses(theta_CP, data))


def towards(learner: Learner, start_CP: Tensor, goal_CP: Tensor, step: float) -> Tensor:
    """Return start + step (goal - start) for trained parameters, and the goal's buffers.

    A step may exceed 1, which could make a variance among the buffers negative.
    """
    moved_CP = (1 - step) * start_CP + step * goal_CP
    return torch.cat([moved_CP[:, : learner.weights], goal_CP[:, learner.weights :]], 1)


def draw_batches(learner: Learner, data: Block, key: Key) -> Tensor:
    """Return batch_CE, the examples that each client draws for one batch."""
    batch_CE = torch.zeros(len(data), data.width, dtype=torch.bool)
    for c, (client, count) in enumerate(zip(data.clients, data.counts_C.tolist(), strict=True)):
        order = torch.randperm(count, generator=key.of(client).torch())
        batch_CE[c, order[: learner.training.batch]] = True
    return batch_CE
