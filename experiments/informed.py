"""FedSPD if it knew: every example is in the cluster of its true distribution from the start and stays there.

    python experiments/informed.py experiments/images.toml topology.degree=3 seed=0

No client could know this. It shows what FedSPD's training, averaging, blend and final phase would give if its clustering
were perfect: the first columns of centers.py, and the accuracy after the final phase.
"""

import sys
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from centers import ways
from fedspd.algorithms.fedspd import FedSPD, State, shares
from fedspd.config import load, method_options
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, one_thread
from fedspd.engines.simulator import InProcess, Simulator
from fedspd.experiment.build import build_experiment


@dataclass(frozen=True)
class Informed(FedSPD):
    truth: tuple[Tensor, ...] = ()  # of every client of the network

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        return self.told(super().begin(learner, data, key), data)

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        return self.told((yield from super().round(learner, state, data, key)), data)

    def told(self, state: State, data: Block) -> State:
        assignment_CE = torch.full_like(state.assignment_CE, -1)
        for c, client in enumerate(data.clients):
            assignment_CE[c, : len(self.truth[client])] = self.truth[client]
        return replace(
            state, assignment_CE=assignment_CE, mixture_CS=shares(assignment_CE, self.clusters)
        )


def main(config: Path, overrides: list[str]) -> None:
    experiment = build_experiment(load(config, overrides))
    plan, rounds = experiment.plan, experiment.config.rounds
    truth = tuple(torch.from_numpy(own) for own in plan.truth)
    options = {
        **method_options(experiment.config),
        "clusters": plan.distributions,
        "align_every": 0,
        "truth": truth,
    }
    plan = replace(plan, algorithm=Informed(**options))
    with one_thread(), closing(Simulator(plan)) as engine:
        engine.begin()
        for t in range(1, rounds + 1):
            engine.round(t, experiment.topology.at(t))
            print(f"round {t} of {rounds}", end="\r", file=sys.stderr)
        (worker,) = engine.workers
        assert isinstance(worker, InProcess)
        found = ways(plan.learner, worker.desk.runner.state, plan.test)
        engine.finish(rounds + 1)
        found["final"] = engine.measure().accuracy_C.mean()
    print(*(f"{name} {100 * value:.1f}" for name, value in found.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
