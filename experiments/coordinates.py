"""How well a search knows the clients: coordinates against the true shares of the populations.

    python experiments/coordinates.py --data fashion-mnist --degree 3
    python experiments/coordinates.py --clients 100 --examples 20

It prints, for three searches, the ratio of eigenvalues that S is chosen by and R2, the share of the
variance of the true shares that the coordinates explain. *after the warm-up* takes the heads that
clients train in round 3 minus their neighbourhood's mean. *trained folds* takes the heads of models
that train for a round on one fold each. *moved heads* is the search of FedSPD-Split. All means and
eigenvalues are exact, so that gossip has no part in it.

Shapes: N clients, F folds, M directions, Q parameters of a head, S populations.
"""

import argparse

import torch
from torch import Tensor

from fedspd.algorithms.fedspd_split import FOLDS
from fedspd.algorithms.populations import (
    balanced_weights,
    fold_moments,
    largest_gap,
    move_heads,
    without_mean_feature,
)
from fedspd.config import validate
from fedspd.experiment.build import Experiment, build_experiment
from map_runs import MLP, WORLDS, Tree, cell, merge

SHOWN = (
    "labellings, mixed",
    "four labels swapped, mixed",
    "rotation, mixed",
    "parity, mixed",
    "four rotations, pure",
    "iid",
)


def searches(experiment: Experiment, rounds: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_N1Q of the last round and d_NFQ of two searches in round 1."""
    plan = experiment.plan
    learner, data, W = plan.learner, plan.train, mixing(experiment)
    one, state = learner.split(1), plan.algorithm.begin(learner, plan.train, plan.key)
    model_NP, key = state.model_CP, plan.key.at(1)
    fold_NE = data.random_folds(FOLDS, key.of("folds"))
    only_NFE = data.present_CE[:, None] & (fold_NE[:, None] == torch.arange(FOLDS)[:, None])
    weight_NE = balanced_weights(state.log_prior_CK, data)
    moved = move_heads(learner, model_NP, only_NFE, weight_NE, data, key)
    mean_NX = fold_moments(*moved).mean((0, 1)).expand(len(data), -1)
    model_NA = one.join(model_NP, state.offsets_CSQ, state.log_prior_CK)
    folds = [
        one.train(model_NA, data, key.of("fold", f), only_CE=only_NE) - model_NA
        for f, only_NE in enumerate(only_NFE.unbind(1))
    ]
    trained_NFQ = torch.stack([learner.cut.head(one.separate(fold)[0]) for fold in folds], 1)
    for t in range(1, rounds + 1):
        model_NA = one.join(model_NP, state.offsets_CSQ, state.log_prior_CK)
        last_NP, _ = one.separate(one.train(model_NA, data, plan.key.at(t).of("train", 0)))
        model_NP = W @ last_NP
    d_NQ = learner.cut.head(last_NP - model_NP)
    return (
        d_NQ[:, None].double(),
        (trained_NFQ - trained_NFQ.mean((0, 1))).double(),
        without_mean_feature(*moved, mean_NX).double(),
    )


def mixing(experiment: Experiment) -> Tensor:
    """Return the matrix of neighbourhood means."""
    graph = experiment.topology.at(1)
    W = torch.zeros(graph.clients, graph.clients)
    for i in range(graph.clients):
        W[i, torch.from_numpy(graph.closed(i))] = 1 / len(graph.closed(i))
    return W


def eigenpairs(d_NFQ: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors, the largest first; of pairs of different folds."""
    unit_NFQ = d_NFQ / d_NFQ.norm(dim=2, keepdim=True)
    N, F, _ = unit_NFQ.shape
    total_NQ = unit_NFQ.sum(1)
    operator = total_NQ.T @ total_NQ / N
    if F > 1:
        rows = unit_NFQ.flatten(0, 1)
        operator = (operator - rows.T @ rows / N) / (F * (F - 1))
    values, vectors = torch.linalg.eigh(operator)
    return values.flip(0), vectors.flip(1).T


def explained(z_NM: Tensor, share_NS: Tensor) -> float:
    """Return R2 of a linear fit of the true shares on the coordinates."""
    design = torch.cat([z_NM, torch.ones(len(z_NM), 1, dtype=torch.double)], 1)
    rest = share_NS - design @ torch.linalg.lstsq(design, share_NS).solution
    return float(1 - rest.square().sum() / (share_NS - share_NS.mean(0)).square().sum())


def row(base: Tree, data: str, world: str, degree: int, seed: int) -> list[str]:
    """Return the cells of a run."""
    found = cell("x", base, data, world, degree, seed, "fedspd-split")
    experiment = build_experiment(validate(found.config))
    plan, cells = experiment.plan, [world]
    S = plan.distributions
    counts = [torch.bincount(torch.from_numpy(own), minlength=S) / len(own) for own in plan.truth]
    share_NS = torch.stack(counts).double()
    for d_NFQ in searches(experiment):
        values, vectors = eigenpairs(d_NFQ)
        _, ratio = largest_gap(values[None, :4], len(d_NFQ))
        z_NM = d_NFQ.mean(1) @ vectors[: max(1, S - 1)].T
        r2 = f"{explained(z_NM, share_NS):.2f}" if S > 1 else ""
        cells += [f"{float(ratio):.1f}", r2]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--degree", type=int, default=3)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1000)
    given = parser.parse_args()
    size = {"clients": given.clients, "data": {"examples": given.examples, "test_examples": 10}}
    base = merge(MLP, {**size, "training": {"lr": 0.1}})
    print("| world | after the warm-up: ratio | R2 | trained folds: ratio | R2 "
          "| moved heads: ratio | R2 |")  # fmt: skip
    print("|---|--:|--:|--:|--:|--:|--:|")
    for world in SHOWN:
        assert world in WORLDS
        cells = row(base, given.data, world, given.degree, given.seed)
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
