"""IFCA: hard clusters of clients (Ghosh et al.; NeurIPS 2020).

An Efficient Framework for Clustered Federated Learning. Each client trains the one center that has
the least loss on all its examples.

Shapes: C clients, S clusters, P parameters of a model, E examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedspd.algorithms.fedspd import pick
from fedspd.core.algorithm import Algorithm, Observation, Round
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.keys import Key
from fedspd.core.learner import Learner


@dataclass(frozen=True)
class State:
    centers_CSP: Tensor  # c_is
    mixture_CS: Tensor  # 1 for the chosen cluster, else 0
    assignment_CE: Tensor  # the chosen cluster; -1 where there is no example
    loss_C: Tensor  # mean loss of the chosen center

    @property
    def chosen_CP(self) -> Tensor:
        """The chosen center of every client."""
        return pick(self.centers_CSP, self.mixture_CS.argmax(1))


@dataclass(frozen=True)
class IFCA(Algorithm[State]):
    """S centers, of which every client chooses one in each round."""

    EXAMPLES_MEET: ClassVar[str | None] = "the choice of a cluster by the mean loss of all examples"

    clusters: int = 2  # S

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        draws_SP = torch.stack([learner.draw(key.of("model", s)) for s in range(self.clusters)])
        return choose(learner, draws_SP.repeat(len(data), 1, 1), data)

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        chosen_C1 = state.mixture_CS.argmax(1, keepdim=True)
        all_CS = torch.arange(self.clusters).expand(len(data), -1)
        neighbourhood = yield Exchange(
            cluster_CK=chosen_C1,
            model_CKP=learner.train(state.chosen_CP, data, key.of("train", 0))[:, None],
            weight_CK=data.counts_C[:, None],
            want_CM=all_CS,
        )
        return choose(learner, neighbourhood.average_centers(state.centers_CSP), data)

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        return learner.predict(state.chosen_CP, x)

    def observe(self, state: State) -> Observation:
        return Observation(
            state.loss_C,
            state.mixture_CS,
            state.assignment_CE,
            state.centers_CSP,
            state.chosen_CP,
        )

    def share(self, state: State) -> tuple[Tensor, Tensor]:
        return torch.arange(self.clusters).expand(len(state.centers_CSP), -1), state.centers_CSP

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        first = self.begin(learner, data, key)
        return choose(learner, neighbourhood.average_centers(first.centers_CSP), data)


def choose(learner: Learner, centers_CSP: Tensor, data: Block) -> State:
    """Let each client choose the center with the least mean loss; ties go to the lowest label."""
    losses_CSE = learner.losses(centers_CSP, data).nan_to_num(nan=torch.inf, posinf=torch.inf)
    loss_CS = losses_CSE.sum(2) / data.counts_C[:, None]
    chosen_C = loss_CS.argmin(1)
    mixture_CS = torch.nn.functional.one_hot(chosen_C, centers_CSP.shape[1]).double()
    assignment_CE = torch.where(data.present_CE, chosen_C[:, None], -1)
    return State(centers_CSP, mixture_CS, assignment_CE, loss_CS.min(1).values)
