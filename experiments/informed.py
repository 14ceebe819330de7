"""Train FedSPD with perfect clustering: each example stays in the cluster of its true distribution.

    python experiments/informed.py experiments/images.toml topology.degree=3 seed=0

No client could know the truth. The script shows what FedSPD's training, averaging, blend and final
phase would reach with a perfect clustering: it prints the first columns of centers.py, and the
accuracy after the final phase.
"""

import sys
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from centers import score_uses
from fedspd.algorithms.fedspd import FedSPD, State, shares
from fedspd.config import load, method_options
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, one_thread
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import build_experiment
from fedspd.runtime.plan import Plan


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


def main(config: Path, overrides: list[str]) -> None:
    """Train and print the accuracies."""
    experiment = build_experiment(load(config, overrides))
    rounds = experiment.config.rounds
    plan = informed_plan(experiment.plan, method_options(experiment.config))
    with one_thread(), closing(Simulator(plan)) as engine:
        engine.begin()
        for t in range(1, rounds + 1):
            engine.round(t, experiment.topology.at(t))
            print(f"round {t} of {rounds}", end="\r", file=sys.stderr)
        found = score_uses(plan.learner, engine.block.state, plan.test)
        engine.finish(rounds + 1)
        found["final"] = engine.measure().accuracy_C.mean()
    print(*(f"{name} {100 * value:.1f}" for name, value in found.items()))


def informed_plan(plan: Plan, options: dict[str, Any]) -> Plan:
    """Return the plan with FedSPD informed of the truth, and without an alignment of labels."""
    truth = tuple(torch.from_numpy(labels) for labels in plan.truth)
    given = {**options, "clusters": plan.distributions, "align_every": 0, "truth": truth}
    return replace(plan, algorithm=Informed(**given))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
