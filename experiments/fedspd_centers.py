"""Show what FedSPD's centers know before the final phase, and what the true clusters would give.

    python experiments/fedspd_centers.py

The settings are those of part a of the map, degree 6, three seeds. Each setting is trained twice:
as FedSPD does it, and with every example in the cluster of its true distribution, which no client
could know. Accuracies are means over clients and seeds in per cent:

    blend     one model, sum_s u_is c_is, as FedSPD has it
    outputs   the outputs of all centers, sum_s u_is softmax(f(x; c_is)), as FedEM has it
    largest   the center with the largest u_is alone
    final     the blend after the final phase

The other columns are shares of all training examples:

    major     examples in the larger cluster
    truth     examples in the cluster that holds most examples of their true distribution
    label     examples in the cluster that holds most examples of their label

If `truth` is near 100, the clusters are the distributions. If `label` is near 100, they are sets of
labels. If both are near `major`, they are neither.
"""

from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedspd.algorithms.fedspd import FedSPD, State, blend, pick, shares
from fedspd.config import method_options, validate
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, one_thread
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import Experiment, build_experiment
from fedspd.runtime.plan import Plan
from map_runs import MLP, cell, tuned

DATA = ("fashion-mnist", "mnist")
WORLDS = ("rotation, mixed", "parity, mixed", "labellings, mixed")
USES = ("blend", "outputs", "largest", "final")
SHARES = ("major", "truth", "label")


@dataclass(frozen=True)
class Informed(FedSPD):
    """FedSPD with the true distribution of every example as its cluster."""

    truth: tuple[Tensor, ...] = ()  # of every client of the network

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        """Begin as FedSPD does, with the true clusters."""
        return self.with_true_clusters(super().begin(learner, data, key), data)

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        """Run a round as FedSPD does, and restore the true clusters."""
        state = yield from super().round(learner, state, data, key)
        return self.with_true_clusters(state, data)

    def with_true_clusters(self, state: State, data: Block) -> State:
        """Return the state with every example in the cluster of its distribution."""
        assignment_CE = torch.full_like(state.assignment_CE, -1)
        for c, client in enumerate(data.clients):
            assignment_CE[c, : len(self.truth[client])] = self.truth[client]
        mixture_CS = shares(assignment_CE, self.clusters)
        return replace(state, assignment_CE=assignment_CE, mixture_CS=mixture_CS)


def informed(experiment: Experiment) -> Experiment:
    """Return the experiment with FedSPD informed of the truth, and no alignment of labels."""
    plan, options = experiment.plan, method_options(experiment.config)
    options = {**options, "clusters": plan.distributions, "align_every": 0}
    truth = tuple(torch.from_numpy(labels) for labels in plan.truth)
    return replace(experiment, plan=replace(plan, algorithm=Informed(**options, truth=truth)))


def main() -> None:
    """Print one row of a Markdown table for every dataset and world."""
    heads = ("data", "world", *USES, *(f"{name}, true clusters" for name in USES), *SHARES)
    print("| " + " | ".join(heads) + " |\n|---|---|" + "--:|" * (len(heads) - 2))
    for data in DATA:
        for world in WORLDS:
            values = np.mean([run_both(data, world, seed) for seed in range(3)], axis=0)
            row = (data, world, *(f"{100 * value:.1f}" for value in values))
            print("| " + " | ".join(row) + " |", flush=True)


def run_both(data: str, world: str, seed: int) -> list[float]:
    """Return the columns of one seed."""
    config = validate(cell("a", tuned(MLP, "fedspd", data), data, world, 6, seed, "fedspd").config)
    own_uses, own_shares = train(build_experiment(config))
    true_uses, _ = train(informed(build_experiment(config)))
    return [*own_uses, *true_uses, *own_shares]


def train(experiment: Experiment) -> tuple[list[float], list[float]]:
    """Train to the end; return the accuracies of USES and the SHARES."""
    plan, rounds = experiment.plan, experiment.config.rounds
    with one_thread(), closing(Simulator(plan)) as engine:
        engine.begin()
        for t in range(1, rounds + 1):
            engine.round(t, experiment.topology.at(t))
        state = engine.block.state
        uses, shares_found = score_uses(plan.learner, state, plan.test), cluster_shares(plan, state)
        engine.finish(rounds + 1)
        uses.append(float(engine.measure().accuracy_C.mean()))
    return uses, shares_found


# ---- accuracies


def score_uses(learner: Learner, state: State, test: Block) -> list[float]:
    """Return the accuracies of blend, outputs and largest."""
    largest_CP = pick(state.centers_CSP, state.mixture_CS.argmax(1))
    found = [
        model_outputs(learner, blend(state), test),
        mixed_outputs(learner, state, test),
        model_outputs(learner, largest_CP, test),
    ]
    return [accuracy(outputs, test) for outputs in found]


def model_outputs(learner: Learner, model_CP: Tensor, test: Block) -> list[Tensor]:
    """Return the outputs of each client's model for its test examples."""
    return [learner.outputs(model_P, x) for model_P, x in zip(model_CP, test.x, strict=True)]


def mixed_outputs(learner: Learner, state: State, test: Block) -> list[Tensor]:
    """Return each client's mixture of the outputs of its centers."""
    by_cluster = [
        model_outputs(learner, model_CP, test) for model_CP in state.centers_CSP.unbind(1)
    ]
    mixed = []
    for u_S, *outputs in zip(state.mixture_CS, *by_cluster, strict=True):
        weighted = [u * output.softmax(1) for u, output in zip(u_S, outputs, strict=True)]
        mixed.append(sum(weighted, torch.zeros(1)))
    return mixed


def accuracy(outputs: list[Tensor], test: Block) -> float:
    """Return the mean over clients of the share of correct predictions."""
    pairs = zip(outputs, test.y, strict=True)
    correct = [(output.argmax(1) == y).double().mean() for output, y in pairs]
    return float(torch.stack(correct).mean())


# ---- clusters


def cluster_shares(plan: Plan, state: State) -> list[float]:
    """Return the SHARES of a state."""
    assigned = state.assignment_CE[state.assignment_CE >= 0]
    truth = torch.from_numpy(np.concatenate(plan.truth))
    label = torch.cat(list(plan.train.y))
    return [majority_share(assigned, kind) for kind in (torch.zeros_like(assigned), truth, label)]


def majority_share(assigned: Tensor, kind: Tensor) -> float:
    """Return the share of examples in the cluster that holds most examples of their kind."""
    largest = [int(assigned[kind == k].bincount().max()) for k in set(kind.tolist())]
    return sum(largest) / len(kind)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
