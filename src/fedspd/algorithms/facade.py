"""FACADE: one shared body, and a head for every cluster of clients (Biswas et al.; SaTML 2025).

Fair Decentralized Learning. Each client chooses the head that, on the shared body, has the least
loss on all its examples. It trains both, and averages the body with all neighbours.

Shapes: C clients, S clusters, P parameters of a model, B of its body, Q of its head.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedspd.algorithms.fedper import exchange_body
from fedspd.algorithms.fedspd import put
from fedspd.algorithms.ifca import IFCA, State, choose
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.core.ledger import NO_CLUSTER
from fedspd.core.travel import ModelPart


@dataclass(frozen=True)
class FACADE(IFCA):
    """S heads on one body at every client; the centers of a state all have that body."""

    EXCHANGES: ClassVar[tuple[ModelPart, ...]] = ("model", "body", "head")

    def check_learner(self, learner: Learner) -> None:
        _ = learner.cut  # refuses a model without a linear layer

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        draws_SP = torch.stack([learner.draw(key.of("model", s)) for s in range(self.clusters)])
        body_SB = learner.cut.body(draws_SP[:1]).expand(self.clusters, -1)
        centers_SP = learner.cut.join(body_SB, learner.cut.head(draws_SP))
        return choose(learner, centers_SP.repeat(len(data), 1, 1), data)

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        cut = learner.cut
        trained_CP = learner.train(state.chosen_CP, data, key.of("train", 0))
        body_CB = yield from exchange_body(cut.body(trained_CP), data)
        chosen_C1 = state.mixture_CS.argmax(1, keepdim=True)
        heads_CSQ = put(cut.head(state.centers_CSP), chosen_C1, cut.head(trained_CP)[:, None])
        is_model = not body_CB.shape[1]  # else the body counts as the model
        heads_CSQ = yield from self._exchange_heads(heads_CSQ, chosen_C1, data, is_model)
        body_CSB = body_CB[:, None].expand(-1, self.clusters, -1)
        return choose(learner, cut.join(body_CSB, heads_CSQ), data)

    def _exchange_heads(
        self, heads_CSQ: Tensor, chosen_C1: Tensor, data: Block, is_model: bool
    ) -> Round[Tensor]:
        """Offer the chosen head; average every head with those received under its index.

        A client's own head counts too, chosen or not. A server has one copy of each head, so there
        only the chosen ones count.
        """
        all_CS = torch.arange(self.clusters).expand(len(data), -1)
        offered_C1Q = heads_CSQ[torch.arange(len(data))[:, None], chosen_C1]
        weight_C1 = data.counts_C[:, None]
        answer = yield Exchange(
            chosen_C1, offered_C1Q, weight_C1, all_CS, is_model=is_model, part="head"
        )
        if not data.server:
            others_CS = torch.where(all_CS == chosen_C1, NO_CLUSTER, all_CS)
            answer = answer.with_own(others_CS, heads_CSQ, weight_C1.expand_as(others_CS))
        return answer.average_centers(heads_CSQ)
