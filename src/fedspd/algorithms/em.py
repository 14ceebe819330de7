"""Expectation-maximisation of mixtures: how likely each cluster explains an example.

Shapes: C clients, S clusters, E examples.
"""

import torch
from torch import Tensor

from fedspd.core.block import Block

NEWCOMER_STEPS = 20  # EM steps of a newcomer, on its mixture alone


def log_joint(mixture_CS: Tensor, losses_CSE: Tensor) -> Tensor:
    """Return log u_is - loss_s of every example; a loss that is not a number counts as infinite."""
    losses_CSE = losses_CSE.double().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return mixture_CS.log()[:, :, None] - losses_CSE


def posterior(mixture_CS: Tensor, losses_CSE: Tensor, data: Block) -> Tensor:
    """Return r_CSE ~ u_is exp(-loss_s), which sums to 1 over clusters; 0 without an example."""
    least = torch.finfo(torch.double).min  # where no cluster explains an example, all are equal
    joint_CSE = log_joint(mixture_CS, losses_CSE).clamp(min=least)
    joint_CSE = torch.where((mixture_CS > 0)[:, :, None], joint_CSE, -torch.inf)
    return torch.where(data.present_CE[:, None], joint_CSE.softmax(1), 0.0)
