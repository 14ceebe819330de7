"""FedSoft: Soft Clustered Federated Learning with Proximal Local Updating (Ruan, Joe-Wong; AAAI 2022).

Each client trains one personal model on all its examples, held near the centers by a proximal term, and offers that
model as a vote for one cluster. Both rules, all data for every center and a vote by probability, are the paper's.

Shapes: C clients, N clients of the network, S clusters, P numbers in a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
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
    centers_CSP: Tensor  # c_is
    mixture_CS: Tensor  # u_is
    assignment_CE: Tensor  # the cluster with the least loss, when u was last estimated; -1 where there is no example
    loss_C: Tensor  # mean loss of w_i


@dataclass(frozen=True)
class FedSoft(Algorithm[State]):
    clusters: int = 2  # S
    lambda_: Annotated[
        float, Field(ge=0, alias="lambda", description="weight of the proximal term (lambda)")
    ] = 0.1
    estimate_every: Annotated[
        int, Field(ge=1, description="rounds between two estimates of u (tau)")
    ] = 2
    sigma: Annotated[float, Field(gt=0, le=1, description="what a share u_is of zero becomes")] = (
        1e-4
    )
    select: Annotated[
        int | None,
        Field(
            ge=1, description="on a star: clients that the server picks per cluster; default: half"
        ),
    ] = None

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        draws_SP = torch.stack([learner.draw(key.of("model", s)) for s in range(self.clusters)])
        C = len(data)
        return State(
            draws_SP[0].repeat(C, 1), draws_SP.repeat(C, 1, 1), torch.ones(C, self.clusters, dtype=torch.double) / self.clusters,
            torch.where(data.present_CE, 0, -1), torch.full((C,), torch.nan),
        )  # fmt: skip

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        if (key.round - 1) % self.estimate_every == 0:
            state = self.estimate(learner, state, data)
        trained_CP = self.local_update(learner, state, data, key)
        vote_CK = yield from self.votes(state, data, key)
        all_CS = torch.arange(self.clusters).expand(len(data), -1)
        offered_CKP = trained_CP[:, None].expand(-1, vote_CK.shape[1], -1)
        neighbourhood = yield Exchange(
            vote_CK, offered_CKP, data.counts_C[:, None].expand_as(vote_CK), all_CS
        )
        return with_loss(
            learner,
            replace(
                state,
                model_CP=trained_CP,
                centers_CSP=neighbourhood.average_centers(state.centers_CSP),
            ),
            data,
        )

    def local_update(self, learner: Learner, state: State, data: Block, key: Key) -> Tensor:
        """f_i(w) + lambda/2 sum_s u_is ||w - c_is||^2: the sum pulls towards the weighted mean of the centers."""
        weight_C1 = state.mixture_CS.sum(1, keepdim=True)
        anchor_CP = torch.einsum(
            "cs,csp->cp", (state.mixture_CS / weight_C1).to(state.centers_CSP), state.centers_CSP
        )
        pull_C = self.lambda_ * weight_C1[:, 0]
        return learner.train(
            state.model_CP, data, key.of("train", 0), anchor_CP=anchor_CP, pull_C=pull_C
        )

    def estimate(self, learner: Learner, state: State, data: Block) -> State:
        """u_is: the share of the client's examples that have their least loss under c_is."""
        losses_CSE = learner.losses(state.centers_CSP, data).nan_to_num(nan=torch.inf)
        assignment_CE = torch.where(data.present_CE, losses_CSE.argmin(1), -1)
        count_CS = torch.stack(
            [(assignment_CE == s).sum(1) for s in range(self.clusters)], 1
        ).double()
        share_CS = count_CS / data.counts_C[:, None]
        return replace(
            state,
            assignment_CE=assignment_CE,
            mixture_CS=torch.where(share_CS > 0, share_CS, self.sigma),
        )

    def votes(self, state: State, data: Block, key: Key) -> Round[Tensor]:
        """vote_CK: the clusters that the client's model speaks for; -1 for none."""
        if data.server:
            return (yield from self.picked_by_server(state, data, key))
        draws = [
            torch.multinomial(u, 1, generator=key.of(i, "vote").torch())
            for i, u in zip(data.clients, state.mixture_CS, strict=True)
        ]
        return torch.stack(draws)

    def picked_by_server(self, state: State, data: Block, key: Key) -> Round[Tensor]:
        """For each cluster the server picks clients with probability u_is n_i / sum_j u_js n_j, without repetition."""
        first_C1 = torch.zeros(len(data), 1, dtype=torch.long)
        chance_C1S = (state.mixture_CS * data.counts_C[:, None])[:, None].to(state.model_CP)
        neighbourhood = yield Exchange(
            first_C1, chance_C1S, data.counts_C[:, None], first_C1, is_model=False
        )
        chance_NS = neighbourhood.offers.model_CKP[:, 0].double().cpu()
        count = min(self.select or max(1, data.network_size // 2), len(chance_NS))
        votes_CS = torch.full((len(data), self.clusters), -1)
        for s in range(self.clusters):
            picked = torch.multinomial(
                chance_NS[:, s], count, generator=key.of("server", s).torch()
            )
            votes_CS[np.isin(data.clients, neighbourhood.sender_ids[picked]), s] = s
        return votes_CS

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        return [
            learner.outputs(model_P, own) for model_P, own in zip(state.model_CP, x, strict=True)
        ]

    def observe(self, state: State) -> Observation:
        return Observation(
            state.loss_C,
            state.mixture_CS,
            state.assignment_CE,
            state.centers_CSP,
            state.model_CP,
        )

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        return torch.arange(self.clusters).expand(len(state.centers_CSP), -1), state.centers_CSP

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        """Its personal model starts from the mean of the centers that it hears, weighted by its shares."""
        first = self.begin(learner, data, key)
        state = self.estimate(
            learner,
            replace(first, centers_CSP=neighbourhood.average_centers(first.centers_CSP)),
            data,
        )
        share_CS = (state.mixture_CS / state.mixture_CS.sum(1, keepdim=True)).to(state.centers_CSP)
        state = replace(state, model_CP=torch.einsum("cs,csp->cp", share_CS, state.centers_CSP))
        return with_loss(
            learner, replace(state, model_CP=self.local_update(learner, state, data, key)), data
        )


def with_loss(learner: Learner, state: State, data: Block) -> State:
    return replace(
        state, loss_C=learner.losses(state.model_CP[:, None], data).sum((1, 2)) / data.counts_C
    )
