"""FedRep: a shared body with a personal head, trained in turn (Collins et al.; ICML 2021).

Exploiting Shared Representations for Personalized Federated Learning. Each client trains its head
on the frozen body, then the body under the frozen head, and averages the body alone. Without a
server it is known as DFedAlt (Shi et al.; 2023) and DePRL (Xiong et al.; 2024).

The local epochs are divided, so that the cost is that of the other methods: the first half trains
the head, the second the body. Of an odd number the head takes the larger part, as in the paper. A
single epoch is divided by examples: a random half trains the head, the other half the body.

Shapes: C clients, P parameters of a model, E examples.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedspd.algorithms.fedper import FedPer, head_alone
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner


@dataclass(frozen=True)
class FedRep(FedPer):
    """FedPer whose clients train head and body one after the other."""

    EXAMPLES_MEET: ClassVar[str | None] = "the halves of the examples that train head and body"

    def local_update(self, learner: Learner, model_CP: Tensor, data: Block, key: Key) -> Tensor:
        """Return the models after training the head, then the body."""
        if not learner.cut.body(model_CP).shape[1]:
            return learner.train(model_CP, data, key)
        rates, head_W = learner.training.rates(key.round), head_alone(learner)
        middle, first_CE, second_CE = (len(rates) + 1) // 2, data.present_CE, data.present_CE
        if len(rates) == 1:
            half_CE = data.random_folds(2, key.of("halves"))
            first_CE, second_CE = first_CE & (half_CE == 0), second_CE & (half_CE == 1)
        phases = (
            ("head", rates[:middle], first_CE, head_W),
            ("body", rates[middle:] or rates, second_CE, 1 - head_W),
        )
        for name, own, only_CE, factor_W in phases:
            model_CP = learner.train(
                model_CP, data, key.of(name), rates=own, only_CE=only_CE, factor_W=factor_W
            )
        return model_CP
