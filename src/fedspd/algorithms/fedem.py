"""FedEM: expectation-maximisation over shared models (Marfoq et al.; NeurIPS 2021).

Federated Multi-Task Learning under a Mixture of Distributions. Every client trains every center,
and weights each example by the probability that it belongs to that center: S times FedAvg's cost.

Shapes: C clients, S clusters, P parameters of a model, E examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedspd.algorithms.em import NEWCOMER_STEPS, log_joint, posterior
from fedspd.algorithms.label_score import ScoreName, check_score, scored
from fedspd.core.algorithm import Algorithm, Observation, Round
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner


@dataclass(frozen=True)
class State:
    centers_CSP: Tensor  # c_is
    mixture_CS: Tensor  # pi_is
    losses_CSE: Tensor  # of every example under every center, label-adjusted if `score` is
    assignment_CE: Tensor  # likeliest cluster of every example; -1 where there is no example
    loss_C: Tensor  # mean negative log-likelihood of the mixture


@dataclass(frozen=True)
class FedEM(Algorithm[State]):
    """A mixture of S shared models at every client, fitted by EM."""

    EXAMPLES_MEET: ClassVar[str | None] = "the mixture pi_i, which weighs every example"

    clusters: int = 2  # S
    score: ScoreName = "loss"

    def local_updates(self, round: int, rounds: int) -> int:
        return self.clusters

    def check_learner(self, learner: Learner) -> None:
        check_score(self.score, "fedem", learner)

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        draws_SP = torch.stack([learner.draw(key.of("model", s)) for s in range(self.clusters)])
        even_CS = torch.full((len(data), self.clusters), 1 / self.clusters, dtype=torch.double)
        return with_loss(learner, draws_SP.repeat(len(data), 1, 1), even_CS, data, self.score)

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        posterior_CSE = posterior(state.mixture_CS, state.losses_CSE, data)  # E step: q_k(s)
        mixture_CS = posterior_CSE.sum(2) / data.counts_C[:, None]  # M step: pi_is
        all_CS = torch.arange(self.clusters).expand(len(data), -1)
        neighbourhood = yield Exchange(
            cluster_CK=all_CS,
            model_CKP=self.local_update(learner, state, data, posterior_CSE, key),  # M step: c_is
            weight_CK=data.counts_C[:, None].expand(-1, self.clusters),
            want_CM=all_CS,
        )
        centers_CSP = neighbourhood.mean(all_CS).model_CMP
        return with_loss(learner, centers_CSP, mixture_CS, data, self.score)

    def local_update(
        self, learner: Learner, state: State, data: Block, posterior_CSE: Tensor, key: Key
    ) -> Tensor:
        """Return trained_CSP: every center after training on the examples weighted by q_k(s)."""
        trained = []
        for s in range(self.clusters):
            center_CP, weight_CE = state.centers_CSP[:, s], posterior_CSE[:, s]
            trained.append(learner.train(center_CP, data, key.of("train", s), weight_CE=weight_CE))
        return torch.stack(trained, 1)

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        """Return log sum_s pi_is softmax(c_is(x)), whose cross entropy is a likelihood."""
        return [
            blended(learner, c_SP, pi_S, own)
            for c_SP, pi_S, own in zip(state.centers_CSP, state.mixture_CS, x, strict=True)
        ]

    def observe(self, state: State) -> Observation:
        return Observation(state.loss_C, state.mixture_CS, state.assignment_CE, state.centers_CSP)

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        return torch.arange(self.clusters).expand(len(state.centers_CSP), -1), state.centers_CSP

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        """Take the centers as received, and fit the mixture alone by EM."""
        first = self.begin(learner, data, key)
        centers_CSP, mixture_CS = neighbourhood.average_centers(first.centers_CSP), first.mixture_CS
        state = with_loss(learner, centers_CSP, mixture_CS, data, self.score)
        for _ in range(NEWCOMER_STEPS):
            posterior_CSE = posterior(mixture_CS, state.losses_CSE, data)
            mixture_CS = posterior_CSE.sum(2) / data.counts_C[:, None]
        return with_loss(learner, centers_CSP, mixture_CS, data, self.score)


def with_loss(
    learner: Learner,
    centers_CSP: Tensor,
    mixture_CS: Tensor,
    data: Block,
    score: ScoreName = "loss",
) -> State:
    """Return the state of these centers and mixtures; the likelihood is never label-adjusted."""
    losses_CSE = learner.losses(centers_CSP, data)
    loss_CE = -log_joint(mixture_CS, losses_CSE).logsumexp(1)
    loss_C = torch.where(data.present_CE, loss_CE, 0.0).sum(1) / data.counts_C
    score_CSE = scored(score, losses_CSE, learner, centers_CSP, data)
    likeliest_CE = log_joint(mixture_CS, score_CSE).argmax(1)
    assignment_CE = torch.where(data.present_CE, likeliest_CE, -1)
    return State(centers_CSP, mixture_CS, score_CSE, assignment_CE, loss_C)


def blended(learner: Learner, centers_SP: Tensor, mixture_S: Tensor, x: Tensor) -> Tensor:
    """Return the mixture's prediction; a center without a share may not even be finite."""
    outputs = torch.stack([learner.outputs(model_P, x) for model_P in centers_SP[mixture_S > 0]])
    share = mixture_S[mixture_S > 0].to(outputs).reshape(-1, *[1] * (outputs.ndim - 1))
    if not learner.classifies:
        return (share * outputs).sum(0)
    return (share.log() + outputs.log_softmax(2)).logsumexp(0)
