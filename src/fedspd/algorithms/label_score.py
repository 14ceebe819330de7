"""The label-adjusted score of examples (FedRC; Guo et al.; ICML 2024).

FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust Clustering.
A likelihood p_s(y | x) is divided by q_s(y), the frequency of the label among the examples of the
cluster, so that a cluster does not attract examples just because it knows their label. The paper
counts over all clients; here each client counts its own examples, and counts never leave it.

Shapes: C clients, S clusters, E examples, L labels that a client has.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedspd.core.block import Block
from fedspd.core.errors import ConfigError
from fedspd.core.learner import Learner

SMOOTHING = 1.0  # examples with the client's own label frequencies, added to every cluster

Score = Annotated[
    Literal["loss", "label-adjusted"],
    Field(
        description="What decides which cluster explains an example: its `loss`, as in the paper, "
        "or `label-adjusted`, the loss plus the log frequency of its label in the cluster (FedRC)."
    ),
]


def check_score(score: str, method: str, learner: Learner) -> None:
    """Refuse a score that needs labels where targets are numbers."""
    if score == "label-adjusted" and not learner.classifies:
        raise ConfigError(
            f"{method}.score = '{score}': a regression has no labels; expected 'loss'."
        )


def log_label_frequency(weight_CSE: Tensor, data: Block) -> Tensor:
    """Return log q_s(y) of every example's label; 0 where there is no example.

    weight_CSE is how much of each example belongs to each cluster. Where a cluster has few
    examples, q_s is near the label frequencies of all the client's examples.
    """
    frequency_CSE = torch.zeros_like(weight_CSE, dtype=torch.double)
    for c, y in enumerate(data.y):
        _, index_E = torch.unique(y, return_inverse=True)
        n, weight_SE = len(y), weight_CSE[c, :, : len(y)].double()
        prior_L = SMOOTHING * torch.bincount(index_E).double() / n
        count_SL = prior_L.repeat(len(weight_SE), 1).index_add(1, index_E, weight_SE)
        frequency_SL = count_SL / count_SL.sum(1, keepdim=True)
        frequency_CSE[c, :, :n] = frequency_SL.log()[:, index_E]
    return frequency_CSE
