"""Train with a method of your own, which a config names as module:Class. Here: Ditto.

Li et al.: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.
C clients, P parameters of a model. Run it with: python own_method.py
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fedspd
from fedspd.methods import (
    Algorithm,
    Block,
    Exchange,
    Key,
    Learner,
    Neighbourhood,
    Observation,
    Round,
)


@dataclass(frozen=True)
class State:
    model_CP: Tensor  # w_i, the model that the network agrees on by FedAvg
    personal_CP: Tensor  # v_i, trained on f_i(v) + lambda/2 ||v - w||^2


@dataclass(frozen=True)
class Ditto(Algorithm[State]):
    clusters: int = 1
    pull: float = 0.1  # lambda

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        w_CP = learner.draw(key.of("model", 0)).repeat(len(data), 1)
        return State(w_CP, w_CP)

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        trained_CP = learner.train(state.model_CP, data, key.of("train", 0))
        only_C1 = torch.zeros(len(data), 1, dtype=torch.long)
        weight_C1 = data.counts_C[:, None]
        neighbourhood = yield Exchange(only_C1, trained_CP[:, None], weight_C1, only_C1)
        mean_CP = neighbourhood.mean(only_C1).model_CMP[:, 0]
        return State(mean_CP, self.personalise(learner, state, data, key))

    def personalise(self, learner: Learner, state: State, data: Block, key: Key) -> Tensor:
        pull_C = torch.full((len(data),), self.pull)
        return learner.train(
            state.personal_CP, data, key.of("personal"), anchor_CP=state.model_CP, pull_C=pull_C
        )

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        return learner.predict(state.personal_CP, x)

    def observe(self, state: State) -> Observation:
        return Observation(model_CP=state.personal_CP)

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(state.model_CP), 1, dtype=torch.long), state.model_CP[:, None]

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        own_C1P = self.begin(learner, data, key).model_CP[:, None]
        w_CP = neighbourhood.average_centers(own_C1P)[:, 0]
        return State(w_CP, self.personalise(learner, State(w_CP, w_CP), data, key))


if __name__ == "__main__":
    config = {
        "clients": 8,
        "rounds": 10,
        "data": {"mixture": "dirichlet"},
        "training": {"lr": 0.1, "batch": 20},
    }
    for method, options in (("own_method:Ditto", {"pull": 1.0}), ("fedavg", {})):
        result = fedspd.run({**config, "method": method, "options": options})
        print(f"{method}: {result.accuracy.mean():.1%}, mean over 8 clients")
