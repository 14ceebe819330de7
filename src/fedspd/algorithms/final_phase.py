"""Half-way fine-tuning: each client goes from the shared to its tuned model as far as it helps.

x = a tuned + (1 - a) shared, with a chosen at each client by likelihood in two-fold
cross-validation on its own examples.

Shapes: A values of a, C clients, E examples, X any axes of a table.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fedspd.core.block import Block
from fedspd.core.keys import Key

RETURNS = (0.0, 0.25, 0.5, 0.75, 1.0)  # a: how far a client goes from the shared to the tuned model

State = TypeVar("State")


def tune_half_way(
    tune: Callable[[Key, Tensor], State],
    between: Callable[[State, float | Tensor], State],
    likelihoods: Callable[[State], Tensor],
    data: Block,
    key: Key,
) -> State:
    """Return the state between the shared and the tuned one that each client chooses.

    tune          a key and only_CE -> the state after fine-tuning on those examples
    between       a tuned state and a, or a_C -> a tuned + (1 - a) shared
    likelihoods   a state -> log p_i(y | x) of every example, as a table CE
    """
    tuned = tune(key.of("final"), data.present_CE)
    half_CE = data.random_folds(2, key.of("halves"))
    gain_ACE = torch.zeros(len(RETURNS), len(data), data.width, dtype=torch.double)
    for h in (0, 1):
        is_kept_CE = data.present_CE & (half_CE == h)
        half = tune(key.of(f"half {h}"), is_kept_CE)
        held_out_CE = data.present_CE & ~is_kept_CE
        scores = [likelihoods(between(half, a)) for a in RETURNS]
        gain_ACE += torch.where(held_out_CE, torch.stack(scores) - scores[0], 0)
    return between(tuned, choose_return(gain_ACE, data))


def interpolate(shared_CX: Tensor, tuned_CX: Tensor, a: float | Tensor) -> Tensor:
    """Return a tuned + (1 - a) shared, with one a for all clients or a_C.

    Where a is 0, it is the shared table even if the tuned one is not finite: 0 times NaN is NaN.
    """
    a_C = torch.as_tensor(a).to(shared_CX).expand(len(shared_CX))
    a_CX = a_C.view(-1, *[1] * (shared_CX.ndim - 1))
    return torch.where(a_CX > 0, torch.lerp(shared_CX, tuned_CX, a_CX), shared_CX)


def choose_return(gain_ACE: Tensor, data: Block) -> Tensor:
    """Return a_C: the best one, or 0 where its gain is within its standard error."""
    n_C = data.counts_C
    total_AC = gain_ACE.sum(2)
    best_C = total_AC.argmax(0)
    gain_CE = gain_ACE[best_C, torch.arange(len(data))]
    mean_C = gain_CE.sum(1) / n_C
    spread_CE = torch.where(data.present_CE, gain_CE - mean_C[:, None], 0).square()
    error_C = (spread_CE.sum(1) / (n_C - 1).clamp(min=1) / n_C).sqrt()
    is_better_C = (mean_C > error_C) & (n_C >= 2)
    return torch.where(is_better_C, torch.tensor(RETURNS)[best_C], 0.0)
