"""pFedMe: Personalized Federated Learning with Moreau Envelopes (T. Dinh et al.; NeurIPS 2020).

The network agrees on w; each client predicts with theta, which fits its own examples and stays near w.

Shapes: C clients, P numbers in a model, E examples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedspd.core.algorithm import Algorithm, Observation, Round
from fedspd.core.block import Block
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
    clusters: int = 1
    K: Annotated[int, Field(ge=1, description="gradient steps on theta for every batch")] = 5
    R: Annotated[
        int | None,
        Field(
            ge=1,
            description="batches in a round; default: as many gradient steps as the other methods make",
        ),
    ] = None
    lambda_: Annotated[
        float, Field(gt=0, alias="lambda", description="weight of the proximal term (lambda)")
    ] = 15.0
    personal_lr: Annotated[float, Field(gt=0, description="learning rate of theta")] = 0.01
    beta: Annotated[
        float, Field(gt=0, description="how far w goes towards the neighbourhood's mean")
    ] = 1.0

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        model_CP = learner.draw(key.of("model", 0)).repeat(len(data), 1)
        return State(model_CP, model_CP, torch.full((len(data),), torch.nan))

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
        """R times: theta near w for one batch, then w a step towards theta."""
        theta_CP, eta = w_CP, learner.training.rate(key.round)
        for r in range(self.R or self.usual_R(learner, data, key)):
            batch_CE = draw_batches(learner, data, key.of("batch", r))
            theta_CP = self.solve(learner, theta_CP, w_CP, data, batch_CE, key.of("train", r))
            w_CP = towards(
                learner, w_CP, theta_CP, eta * self.lambda_
            )  # w_i - eta lambda (w_i - theta)
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
        """K steps on f(theta) + lambda/2 ||theta - w||^2 over one batch."""
        pull_C = torch.full((len(data),), self.lambda_)
        steps = [self.personal_lr] * self.K
        return learner.train(
            theta_CP,
            data,
            key,
            rates=steps,
            only_CE=batch_CE,
            anchor_CP=w_CP,
            pull_C=pull_C,
            momentum=0.0,
        )

    def usual_R(self, learner: Learner, data: Block, key: Key) -> int:
        """As many gradient steps as the largest client would make in its local epochs."""
        steps = len(learner.training.rates(key.round)) * math.ceil(
            data.width / learner.training.batch
        )
        return math.ceil(steps / self.K)

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        return [
            learner.outputs(model_P, own) for model_P, own in zip(state.personal_CP, x, strict=True)
        ]

    def observe(self, state: State) -> Observation:
        return Observation(loss_C=state.loss_C, model_CP=state.personal_CP)

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(state.model_CP), 1, dtype=torch.long), state.model_CP[:, None]

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        w_CP = neighbourhood.average_centers(self.begin(learner, data, key).model_CP[:, None])[:, 0]
        _, theta_CP = self.local_update(learner, w_CP, data, key)
        return with_loss(learner, w_CP, theta_CP, data)


def with_loss(learner: Learner, w_CP: Tensor, theta_CP: Tensor, data: Block) -> State:
    return State(
        w_CP, theta_CP, learner.losses(theta_CP[:, None], data).sum((1, 2)) / data.counts_C
    )


def towards(learner: Learner, start_CP: Tensor, goal_CP: Tensor, step: float) -> Tensor:
    """start + step (goal - start) for what is trained. A step may exceed 1, which makes a variance negative: buffers take the goal's."""
    moved_CP = (1 - step) * start_CP + step * goal_CP
    return torch.cat([moved_CP[:, : learner.weights], goal_CP[:, learner.weights :]], 1)


def draw_batches(learner: Learner, data: Block, key: Key) -> Tensor:
    """batch_CE: the examples that each client draws."""
    batch_CE = torch.zeros(len(data), data.width, dtype=torch.bool)
    for c, (client, count) in enumerate(zip(data.clients, data.counts_C.tolist(), strict=True)):
        batch_CE[
            c, torch.randperm(count, generator=key.of(client).torch())[: learner.training.batch]
        ] = True
    return batch_CE
