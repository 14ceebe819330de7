"""FedPer: a shared body with a personal head (Arivazhagan et al.; 2019).

Federated Learning with Personalization Layers. Each client trains body and head together, and
averages the body alone; the head never leaves the client.

Shapes: C clients, P parameters of a model, W that are trained, B of its body.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedspd.core.algorithm import Algorithm, Observation, Round
from fedspd.core.block import Block
from fedspd.core.cut import Cut
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.core.travel import ModelPart

NEWCOMER_EPOCHS = 10  # of a newcomer, on its head alone


@dataclass(frozen=True)
class State:
    model_CP: Tensor  # body b_i and head h_i
    head_C2: Tensor  # where the head starts and stops in the vector
    loss_C: Tensor  # mean loss over the client's own examples


@dataclass(frozen=True)
class FedPer(Algorithm[State]):
    """Federated averaging of the body; every client keeps its head."""

    EXAMPLES_MEET: ClassVar[str | None] = None
    HAS_PAID_PERSONAL_MODEL: ClassVar[bool] = True
    HAS_PUBLIC_ANNOUNCEMENTS: ClassVar[bool] = True
    UNUSED_KEYS: ClassVar[tuple[str, ...]] = ("clusters",)
    EXCHANGES: ClassVar[tuple[ModelPart, ...]] = ("body",)

    clusters: int = 1

    def check_learner(self, learner: Learner) -> None:
        _ = learner.cut  # refuses a model without a linear layer

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        model_CP = learner.draw(key.of("model", 0)).repeat(len(data), 1)
        return state_of(learner, model_CP, torch.full((len(data),), torch.nan))

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        cut = learner.cut
        trained_CP = self.local_update(learner, state.model_CP, data, key.of("train", 0))
        body_CB = yield from exchange_body(cut.body(trained_CP), data)
        return with_loss(learner, cut.join(body_CB, cut.head(trained_CP)), data)

    def local_update(self, learner: Learner, model_CP: Tensor, data: Block, key: Key) -> Tensor:
        """Return the models after training body and head together."""
        return learner.train(model_CP, data, key)

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        return learner.predict(state.model_CP, x)

    def observe(self, state: State) -> Observation:
        return Observation(loss_C=state.loss_C, model_CP=state.model_CP)

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        """Share the body; nothing where there is none."""
        start, stop = state.head_C2[0].tolist()
        body_C1B = Cut(start, stop).body(state.model_CP)[:, None]
        K = min(1, body_C1B.shape[2])
        return torch.zeros(len(body_C1B), K, dtype=torch.long), body_C1B[:, :K]

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        """Take the mean of the received bodies, and train a head on it."""
        cut, first = learner.cut, self.begin(learner, data, key)
        model_CP, (cluster_CK, body_CKB) = first.model_CP, self.share(first)
        if cluster_CK.shape[1]:
            body_CB = neighbourhood.average_centers(body_CKB)[:, 0]
            model_CP = cut.join(body_CB, cut.head(model_CP))
        rates = learner.training.final_rates(NEWCOMER_EPOCHS)
        model_CP = learner.train(
            model_CP, data, key.of("join"), rates=rates, factor_W=head_alone(learner)
        )
        return with_loss(learner, model_CP, data)


def exchange_body(body_CB: Tensor, data: Block) -> Round[Tensor]:
    """Return the mean body over N[i]; a model that is nothing but its head exchanges none."""
    if not body_CB.shape[1]:
        return body_CB
    only_C1 = torch.zeros(len(data), 1, dtype=torch.long)
    weight_C1 = data.counts_C[:, None]
    answer = yield Exchange(only_C1, body_CB[:, None], weight_C1, only_C1, part="body")
    return answer.mean(only_C1).model_CMP[:, 0]


def head_alone(learner: Learner) -> Tensor:
    """Return factor_W: 1 for the parameters of the head, and 0 for those of the body."""
    factor_W = torch.zeros_like(learner.gradient)
    learner.cut.head(factor_W).fill_(1)
    return factor_W


def with_loss(learner: Learner, model_CP: Tensor, data: Block) -> State:
    """Return the state of these models, with their loss."""
    return state_of(learner, model_CP, learner.mean_losses(model_CP, data))


def state_of(learner: Learner, model_CP: Tensor, loss_C: Tensor) -> State:
    """Return the state of these models and losses."""
    head_C2 = torch.tensor([learner.cut.start, learner.cut.stop]).repeat(len(model_CP), 1)
    return State(model_CP, head_C2, loss_C)
