"""How well a search knows the clients: coordinates against the true shares of the populations.

    python experiments/coordinates.py --data fashion-mnist --degree 3 --seeds 2

It prints, for two searches, the ratio of eigenvalues that S is chosen by and R2, the share of the
variance of the true shares that the coordinates explain. *after the warm-up* takes the heads that
clients train in round 3 minus their neighbourhood's mean. *folds, round 1* is the search of
FedSPD-Split. All means are exact, so that gossip has no part in it.

Shapes: N clients, F folds, M directions, Q parameters of a head, S populations.
"""

import argparse

import torch
from torch import Tensor

from fedspd.algorithms.fedspd_split import FOLDS, train_folds
from fedspd.algorithms.final_phase import split_in_folds
from fedspd.algorithms.populations import largest_gap
from fedspd.config import validate
from fedspd.experiment.build import Experiment, build_experiment
from map_runs import MLP, WORLDS, cell, merge

SHOWN = (
    "labellings, mixed",
    "four labels swapped, mixed",
    "rotation, mixed",
    "parity, mixed",
    "four rotations, pure",
    "iid",
)


def searches(experiment: Experiment, rounds: int = 3) -> tuple[Tensor, Tensor]:
    """Return d_N1Q of the last round and d_NFQ of round 1, both minus a mean."""
    plan = experiment.plan
    learner, data, W = plan.learner, plan.train, mixing(experiment)
    one, state = learner.split(1), plan.algorithm.begin(learner, plan.train, plan.key)
    model_NP = state.model_CP
    for t in range(1, rounds + 1):
        key = plan.key.at(t)
        model_NA = one.join(model_NP, state.offsets_CSQ, state.log_prior_CK)
        if t == 1:
            fold_NE = split_in_folds(data, FOLDS, key.of("folds"))
            only_NFE = fold_NE[:, None] == torch.arange(FOLDS)[:, None]
            only_NFE &= data.present_CE[:, None]
            folds_NFQ = train_folds(learner, model_NA, only_NFE, data, key)
        trained_NP, _ = one.separate(one.train(model_NA, data, key.of("train", 0)))
        model_NP = W @ trained_NP
    d_NQ = learner.cut.head(trained_NP - model_NP)
    return d_NQ[:, None].double(), (folds_NFQ - folds_NFQ.mean((0, 1))).double()


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


def row(data: str, world: str, degree: int, seed: int, rate: float) -> list[str]:
    """Return the cells of a run."""
    base = merge(MLP, {"training": {"lr": rate}})
    found = cell("x", base, data, world, degree, seed, "fedspd-split")
    experiment = build_experiment(validate(found.config))
    plan, cells = experiment.plan, [world, str(seed)]
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
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.1)
    given = parser.parse_args()
    print("| world | seed | after the warm-up: ratio | R2 | folds, round 1: ratio | R2 |")
    print("|---|--:|--:|--:|--:|--:|")
    for world in SHOWN:
        assert world in WORLDS
        for seed in range(given.seeds):
            cells = row(given.data, world, given.degree, seed, given.rate)
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
