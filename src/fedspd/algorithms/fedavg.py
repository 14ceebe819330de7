"""FedAvg: federated averaging, with optional fine-tuning (McMahan et al.; AISTATS 2017).

Communication-Efficient Learning of Deep Networks from Decentralized Data. On a graph it is gossip
averaging over the closed neighbourhood; on a star the server averages. With `finetune` it is a
strong baseline: every client trains its model for some more epochs at the end, and with
`interpolate` goes back to the shared model as far as cross-validation says.

With `mu` it is FedProx (Li et al.; Federated Optimization in Heterogeneous Networks; MLSys 2020):
local training stays near the model w that the round began with, by mu/2 ||w_i - w||^2 in the loss.

Shapes: C clients, P parameters of a model.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedspd.algorithms.final_phase import interpolate, tune_half_way
from fedspd.algorithms.local import Local, State, with_loss
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner


@dataclass(frozen=True)
class FedAvg(Local):
    """Federated averaging of one model per client."""

    UNUSED_KEYS: ClassVar[tuple[str, ...]] = ("clusters",)
    FINAL_OPTIONS: ClassVar[tuple[str, ...]] = ("finetune", "interpolate")

    init: Annotated[
        Literal["same", "own"],
        Field(
            description="The initial models: `same`, one draw for all clients, as in the paper; "
            "`own`, one draw per client."
        ),
    ] = "same"
    finetune: Annotated[
        int, Field(ge=0, description="The number of local epochs after the last round.")
    ] = 0
    interpolate: Annotated[
        Literal["none", "cv"],
        Field(
            description="Where fine-tuning ends: `none`, at the fine-tuned model; `cv`, between "
            "the shared and the fine-tuned model, as two-fold cross-validation on the client's own "
            "examples says."
        ),
    ] = "none"
    mu: Annotated[
        float,
        Field(ge=0, description="The weight of the proximal term; above 0, the method is FedProx."),
    ] = 0.0

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        if self.init == "same":
            return super().begin(learner, data, key)
        draws = [learner.draw(key.of("model", client, 0)) for client in data.clients]
        return State(torch.stack(draws), torch.full((len(data),), torch.nan))

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        only_C1 = torch.zeros(len(data), 1, dtype=torch.long)
        neighbourhood = yield Exchange(
            cluster_CK=only_C1,
            model_CKP=self.local_update(learner, state.model_CP, data, key.of("train", 0))[:, None],
            weight_CK=data.counts_C[:, None],
            want_CM=only_C1,
        )
        return with_loss(learner, neighbourhood.mean(only_C1).model_CMP[:, 0], data)

    def local_update(self, learner: Learner, model_CP: Tensor, data: Block, key: Key) -> Tensor:
        """Return the models after local training, near the first ones with `mu`."""
        if not self.mu:
            return learner.train(model_CP, data, key)
        pull_C = torch.full((len(data),), self.mu)
        return learner.train(model_CP, data, key, anchor_CP=model_CP, pull_C=pull_C)

    def finish(self, learner: Learner, state: State, data: Block, key: Key) -> State:
        if not self.finetune:
            return state
        rates = learner.training.final_rates(self.finetune)  # as in FedSPD's final phase
        shared_CP = state.model_CP

        def tune(key: Key, only_CE: Tensor) -> Tensor:
            return learner.train(shared_CP, data, key, rates=rates, only_CE=only_CE)

        def between(tuned_CP: Tensor, a: float | Tensor) -> Tensor:
            return interpolate(shared_CP, tuned_CP, a)

        def likelihoods(model_CP: Tensor) -> Tensor:
            loss_CE = learner.losses(model_CP[:, None], data)[:, 0].double()
            return -loss_CE.nan_to_num(nan=torch.inf, posinf=torch.inf)

        if self.interpolate == "cv":
            tuned_CP = tune_half_way(tune, between, likelihoods, data, key)
        else:
            tuned_CP = tune(key.of("final"), data.present_CE)
        return with_loss(learner, tuned_CP, data)

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(state.model_CP), 1, dtype=torch.long), state.model_CP[:, None]

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        own_C1P = self.begin(learner, data, key).model_CP[:, None]
        return with_loss(learner, neighbourhood.average_centers(own_C1P)[:, 0], data)
