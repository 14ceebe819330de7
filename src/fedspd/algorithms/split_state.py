"""The state of FedSPD-Split, and what its models say of a client's examples.

Shapes: C clients, S clusters, M directions, K classes, P parameters of a model, Q of its head,
E examples.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fedspd.algorithms.em import NEWCOMER_STEPS, log_joint, posterior
from fedspd.algorithms.final_phase import interpolate
from fedspd.core.block import Block
from fedspd.core.heads import SplitLearner
from fedspd.core.keys import Key
from fedspd.core.learner import Learner

LEAST_PRIOR, MOST_PRIOR = 10.0, 1e5  # examples that the prior of all labels alike counts for
LEAST_SHARE = 0.001  # added to every u_is, so that no cluster is lost for good


@dataclass(frozen=True)
class State:
    model_CP: Tensor  # body and V
    offsets_CSQ: Tensor  # D
    mixture_CS: Tensor  # u_i; 0 for a cluster that is not in use
    log_prior_CK: Tensor  # log pi_i + log K: 0 where all labels are alike
    losses_CSE: Tensor  # of every example under every cluster
    clusters_C: Tensor  # S as it was found; 1 before that
    labelling_C: Tensor  # which cluster is which (labellings.py); -1: the client joins one
    spectrum_CM: Tensor  # the eigenvalues that S was chosen by; 0 where it was not
    coordinates_CM: Tensor  # z_i, and the corners among them, between round 1 and the split
    corners_CSM: Tensor
    assignment_CE: Tensor  # the likeliest cluster of every example; -1 where there is no example
    loss_C: Tensor  # mean negative log-likelihood


def log_prior(y: Tensor, classes: int) -> Tensor:
    """Return log pi_y + log K, with pi_y = (n_y + m / K) / (n + m)."""
    count_K = torch.bincount(y, minlength=classes).double()
    m = prior_strength(count_K)
    return ((count_K + m / classes) / (len(y) + m) * classes).log()


def prior_strength(count_K: Tensor) -> float:
    """Return m, the concentration of the symmetric Dirichlet-multinomial that fits best."""
    grid = torch.logspace(math.log10(LEAST_PRIOR), math.log10(MOST_PRIOR), 60, dtype=torch.double)
    n, K = count_K.sum(), len(count_K)
    per_label_GK = torch.lgamma(count_K + grid[:, None] / K) - torch.lgamma(grid[:, None] / K)
    fit_G = torch.lgamma(grid) - torch.lgamma(n + grid) + per_label_GK.sum(1)
    return float(grid[fit_G.argmax()])


def fit_mixture(learner: Learner, state: State, data: Block, rows: list[int], key: Key) -> State:
    """Return the state with the mixture of some clients fitted to their own examples, by EM."""
    if not rows:
        return state
    own, block = rows_of(state, rows), data.select(rows)
    is_used_CS = torch.arange(own.mixture_CS.shape[1]) < own.clusters_C[:, None]
    own = replace(own, mixture_CS=is_used_CS.double() / own.clusters_C[:, None])
    own = refit(learner, with_losses(learner, own, block), block, NEWCOMER_STEPS, key)
    tables = {field.name: getattr(state, field.name).clone() for field in fields(State)}
    for name, table in tables.items():
        table[rows] = getattr(own, name)
    return State(**tables)


def refit(learner: Learner, state: State, data: Block, steps: int, key: Key) -> State:
    """Return the state after some steps of EM on the mixtures alone, from where they stand."""
    for step in range(steps):
        r_CSE = posterior(state.mixture_CS, state.losses_CSE, data)
        state = update_mixture(learner, state, r_CSE, data, key.of(step))
    return with_likelihood(state, data)


def groups(state: State, data: Block) -> Iterator[tuple[int, list[int], State]]:
    """Yield the numbers of clusters, each with its clients' rows and their state."""
    for S in sorted(set(state.clusters_C.tolist())):
        rows = (state.clusters_C == S).nonzero()[:, 0].tolist()
        yield S, rows, rows_of(state, rows)


def rows_of(state: State, rows: list[int]) -> State:
    return State(**{field.name: getattr(state, field.name)[rows] for field in fields(State)})


def joined(split: SplitLearner, state: State) -> Tensor:
    """Return model_CA for the learner of S heads."""
    return split.join(state.model_CP, state.offsets_CSQ[:, : split.clusters], state.log_prior_CK)


def with_losses(learner: Learner, state: State, data: Block) -> State:
    """Return the state with the losses, the assignment and the likelihood of its models."""
    losses_CSE = torch.zeros_like(state.losses_CSE)
    for S, rows, own in groups(state, data):
        split = learner.split(S)
        losses_CSE[rows, :S] = split.cluster_losses(joined(split, own), data.select(rows))
    return with_likelihood(replace(state, losses_CSE=losses_CSE), data)


def with_likelihood(state: State, data: Block) -> State:
    """Return the state with the assignment and the likelihood that follow from its losses."""
    joint_CSE = log_joint(state.mixture_CS, state.losses_CSE)
    loss_CE = torch.where(data.present_CE, -joint_CSE.logsumexp(1), 0)
    return replace(
        state,
        assignment_CE=torch.where(data.present_CE, joint_CSE.argmax(1), -1),
        loss_C=loss_CE.sum(1) / data.counts_C,
    )


def update_mixture(learner: Learner, state: State, r_CSE: Tensor, data: Block, key: Key) -> State:
    """Set u_is to the mean of r_is plus a little, over the clusters that are in use."""
    mean_CS = learner.mean_shares(r_CSE, state.mixture_CS, data, key)
    more_CS = torch.where(state.mixture_CS > 0, mean_CS + LEAST_SHARE, 0.0)
    return replace(state, mixture_CS=more_CS / more_CS.sum(1, keepdim=True))


def between(state: State, tuned: State, a: float | Tensor) -> State:
    """Return a tuned + (1 - a) shared, with one a for all clients or one for each."""
    return replace(
        state,
        model_CP=interpolate(state.model_CP, tuned.model_CP, a),
        offsets_CSQ=interpolate(state.offsets_CSQ, tuned.offsets_CSQ, a),
    )


def likelihoods(learner: Learner, state: State, data: Block) -> Tensor:
    """Return log p_i(y | x) of every example."""
    state = with_losses(learner, state, data)
    return log_joint(state.mixture_CS, state.losses_CSE).logsumexp(1)
