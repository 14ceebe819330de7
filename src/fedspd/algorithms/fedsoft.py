"""FedSoft: soft clusters by proximal local updates (Ruan, Joe-Wong; AAAI 2022).

FedSoft: Soft Clustered Federated Learning with Proximal Local Updating. Each client trains one
personal model on all its examples, with a proximal term towards the centers, and offers that model
as a vote for one cluster. Both rules are the paper's: all data for every center, a random vote.

Shapes: C clients, N clients of the network, K votes of a client, S clusters, P parameters of a
model, E examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedspd.core.algorithm import Algorithm, Observation, Round
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.core.ledger import NO_CLUSTER


@dataclass(frozen=True)
class State:
    model_CP: Tensor  # w_i
    centers_CSP: Tensor  # c_is
    mixture_CS: Tensor  # u_is
    assignment_CE: Tensor  # cluster with the least loss at the last estimate; -1: no example
    loss_C: Tensor  # mean loss of w_i


@dataclass(frozen=True)
class FedSoft(Algorithm[State]):
    """A personal model per client, and S centers made of the clients' votes."""

    EXAMPLES_MEET: ClassVar[str | None] = "the mixture u_i, by which a client votes"

    clusters: int = 2  # S
    lambda_: Annotated[
        float, Field(ge=0, alias="lambda", description="The weight of the proximal term.")
    ] = 0.1
    estimate_every: Annotated[
        int, Field(ge=1, description="The rounds between two estimates of u (tau).")
    ] = 2
    sigma: Annotated[
        float, Field(gt=0, le=1, description="The value that replaces a share u_is of 0.")
    ] = 1e-4
    select: Annotated[
        int | None,
        Field(
            ge=1,
            description="On a star: the clients that the server selects per cluster. The default "
            "is half of them.",
        ),
    ] = None

    def check_network(self, clients: int, server: bool) -> None:
        if self.select is not None and not server:
            raise ConfigError(
                f"fedsoft.select = {self.select}: there is no server to select clients, as "
                "topology.kind is not 'star'. Leave it out."
            )
        if self.select is not None and self.select > clients:
            raise ConfigError(
                f"fedsoft.select = {self.select}: clients = {clients}; expected at most {clients}."
            )

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        draws_SP = torch.stack([learner.draw(key.of("model", s)) for s in range(self.clusters)])
        C, S = len(data), self.clusters
        return State(
            model_CP=draws_SP[0].repeat(C, 1),
            centers_CSP=draws_SP.repeat(C, 1, 1),
            mixture_CS=torch.ones(C, S, dtype=torch.double) / S,
            assignment_CE=torch.where(data.present_CE, 0, -1),
            loss_C=torch.full((C,), torch.nan),
        )

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        if (key.round - 1) % self.estimate_every == 0:
            state = self.estimate(learner, state, data)
        vote_CK = yield from self.votes(state, data, key)
        all_CS = torch.arange(self.clusters).expand(len(data), -1)
        neighbourhood = yield Exchange(
            cluster_CK=vote_CK,
            model_CKP=self.local_update(learner, state, data, key)[:, None].expand(
                -1, vote_CK.shape[1], -1
            ),
            weight_CK=data.counts_C[:, None].expand_as(vote_CK),
            want_CM=all_CS,
        )
        # All votes of a client are its w_i. A name for it above would keep a second copy.
        trained_CP = neighbourhood.own_models()[:, 0]
        centers_CSP = neighbourhood.average_centers(state.centers_CSP)
        return with_loss(learner, replace(state, centers_CSP=centers_CSP), trained_CP, data)

    def local_update(self, learner: Learner, state: State, data: Block, key: Key) -> Tensor:
        """Return w_i trained on f_i(w) + lambda/2 sum_s u_is ||w - c_is||^2.

        The sum pulls towards the weighted mean of the centers.
        """
        pull_C = self.lambda_ * state.mixture_CS.sum(1)
        anchor_CP = weighted_center(state)
        return learner.train(
            state.model_CP, data, key.of("train", 0), anchor_CP=anchor_CP, pull_C=pull_C
        )

    def estimate(self, learner: Learner, state: State, data: Block) -> State:
        """Set u_is to the share of the client's examples that have their least loss under c_is."""
        losses_CSE = learner.losses(state.centers_CSP, data).nan_to_num(nan=torch.inf)
        assignment_CE = torch.where(data.present_CE, losses_CSE.argmin(1), -1)
        counts = [(assignment_CE == s).sum(1) for s in range(self.clusters)]
        share_CS = torch.stack(counts, 1).double() / data.counts_C[:, None]
        mixture_CS = torch.where(share_CS > 0, share_CS, self.sigma)
        return replace(state, assignment_CE=assignment_CE, mixture_CS=mixture_CS)

    def votes(self, state: State, data: Block, key: Key) -> Round[Tensor]:
        """Return vote_CK, the clusters that the client's model is a vote for, or NO_CLUSTER."""
        if data.server:
            return (yield from self.picked_by_server(state, data, key))
        draws = [
            torch.multinomial(u, 1, generator=key.of(i, "vote").torch())
            for i, u in zip(data.clients, state.mixture_CS, strict=True)
        ]
        return torch.stack(draws)

    def picked_by_server(self, state: State, data: Block, key: Key) -> Round[Tensor]:
        """Return vote_CS, where the server picks the clients of each cluster without repetition.

        A client is picked with probability u_is n_i / sum_j u_js n_j.
        """
        first_C1 = torch.zeros(len(data), 1, dtype=torch.long)
        chance_C1S = (state.mixture_CS * data.counts_C[:, None])[:, None].to(state.model_CP)
        weight_C1 = data.counts_C[:, None]
        neighbourhood = yield Exchange(first_C1, chance_C1S, weight_C1, first_C1, is_model=False)
        chance_NS = neighbourhood.offers.model_CKP[:, 0].double().cpu()
        count = min(self.select or max(1, data.network_size // 2), len(chance_NS))
        vote_CS = torch.full((len(data), self.clusters), NO_CLUSTER)
        for s in range(self.clusters):
            generator = key.of("server", s).torch()
            picked = torch.multinomial(chance_NS[:, s], count, generator=generator)
            vote_CS[np.isin(data.clients, neighbourhood.sender_ids[picked]), s] = s
        return vote_CS

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        return learner.predict(state.model_CP, x)

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
        """Start the personal model from the received centers, weighted by the newcomer's shares."""
        first = self.begin(learner, data, key)
        centers_CSP = neighbourhood.average_centers(first.centers_CSP)
        state = self.estimate(learner, replace(first, centers_CSP=centers_CSP), data)
        state = replace(state, model_CP=weighted_center(state))
        return with_loss(learner, state, self.local_update(learner, state, data, key), data)


def weighted_center(state: State) -> Tensor:
    """Return the mean of each client's centers, weighted by its shares."""
    share_CS = (state.mixture_CS / state.mixture_CS.sum(1, keepdim=True)).to(state.centers_CSP)
    return torch.einsum("cs,csp->cp", share_CS, state.centers_CSP)


def with_loss(learner: Learner, state: State, model_CP: Tensor, data: Block) -> State:
    """Return the state with these personal models and their loss."""
    return replace(state, model_CP=model_CP, loss_C=learner.mean_losses(model_CP, data))
