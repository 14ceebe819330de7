"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al.; AISTATS 2017).

On a graph the mean is that of the closed neighbourhood; on a star it is the server's. With `finetune` the strong
baseline: some epochs of each client's own at the end.

Shapes: C clients, P numbers in a model.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedspd.algorithms.local import Local, State, with_loss
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner


@dataclass(frozen=True)
class FedAvg(Local):
    finetune: Annotated[int, Field(ge=0, description="local epochs after the last round")] = 0

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        trained_CP = learner.train(state.model_CP, data, key.of("train", 0))
        only_C1 = torch.zeros(len(data), 1, dtype=torch.long)
        neighbourhood = yield Exchange(
            only_C1, trained_CP[:, None], data.counts_C[:, None], only_C1
        )
        return with_loss(learner, neighbourhood.mean(only_C1).model_CMP[:, 0], data)

    def finish(self, learner: Learner, state: State, data: Block, key: Key) -> State:
        if not self.finetune:
            return state
        rates = learner.training.final_rates(self.finetune)  # as in FedSPD's final phase
        return with_loss(
            learner, learner.train(state.model_CP, data, key.of("final"), rates=rates), data
        )

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(state.model_CP), 1, dtype=torch.long), state.model_CP[:, None]

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        first = self.begin(learner, data, key)
        return with_loss(
            learner, neighbourhood.average_centers(first.model_CP[:, None])[:, 0], data
        )
