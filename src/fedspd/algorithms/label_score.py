"""The label-adjusted score of examples (FedRC; Guo et al.; ICML 2024).

FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust Clustering.
A likelihood p_s(y | x) is divided by q_s(y), the frequency of the label in the cluster, so that a
cluster does not attract examples just because it knows their label. The paper counts labels over
all clients at its server. Here q_s(y) is the mean of p_s(y | x) over the client's own examples: a
center that has learned a label from few examples predicts it rarely, and nothing more is sent.

Shapes: C clients, S clusters, P parameters of a model, E examples, K classes.
"""

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedspd.core.block import Block
from fedspd.core.errors import ConfigError
from fedspd.core.learner import Learner

LEAST_FREQUENCY = 1e-3  # added to q_s(y): no label counts as rarer

ScoreName = Annotated[
    Literal["loss", "label-adjusted"],
    Field(
        description="What decides which cluster explains an example: its `loss`, as in the paper, "
        "or `label-adjusted`, the loss plus the log frequency of its label in the cluster (FedRC)."
    ),
]


def check_score(score: ScoreName, method: str, learner: Learner) -> None:
    """Refuse a score that needs labels where targets are numbers."""
    if score == "label-adjusted" and not learner.classifies:
        raise ConfigError(
            f"{method}.score = '{score}': a regression has no labels; expected 'loss'."
        )


def scored(
    score: ScoreName, losses_CSE: Tensor, learner: Learner, centers_CSP: Tensor, data: Block
) -> Tensor:
    """Return the losses of the centers, adjusted where the score says so."""
    if score == "loss":
        return losses_CSE
    score_CSE = losses_CSE.clone()
    with learner.timed("losses"):
        for c, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
            for s, center_P in enumerate(centers_CSP[c]):
                frequency_K = log_label_frequency(learner.outputs(center_P, x))
                score_CSE[c, s, : len(y)] += frequency_K[y].to(score_CSE)
    return score_CSE


def log_label_frequency(output_EK: Tensor) -> Tensor:
    """Return log q_K, the log of the mean probability of every class over the examples."""
    log_mean_K = output_EK.double().log_softmax(1).logsumexp(0) - math.log(len(output_EK))
    return torch.logaddexp(log_mean_K, torch.tensor(LEAST_FREQUENCY, dtype=torch.double).log())
