"""What a client of FedSPD has before the final phase: its centers blended, as the paper blends them, or used in other ways.

    python experiments/centers.py RUN_FOLDER...

One line for each finished FedSPD run, accuracy in per cent on the clients' test examples, mean over clients:

    blend     one model, sum_s u_is c_is: what FedSPD does
    outputs   the answers of all centers, sum_s u_is softmax(f(x; c_is)): what FedEM does
    largest   the one center with the largest u_is

and shares of all training examples, in per cent:

    major     those in the larger cluster
    truth     those in the cluster that most examples of their true distribution are in
    label     those in the cluster that most examples of their label are in

Truth near 100 says that the clusters are the distributions; label near 100, that they are sets of labels; both near
major, that they are neither.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedspd.algorithms.fedspd import State, blend, pick
from fedspd.config import load
from fedspd.core.block import Block
from fedspd.core.learner import Learner
from fedspd.experiment.build import build_experiment
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.run_folder import RunFolder


def main(folders: list[Path]) -> None:
    print(
        f"{'run':72}"
        + "".join(
            f"{name:>8}" for name in ("blend", "outputs", "largest", "major", "truth", "label")
        )
    )
    for folder in folders:
        runner = finished(folder)
        train, assigned = (
            runner.plan.train,
            runner.state.assignment_CE[runner.state.assignment_CE >= 0],
        )
        kinds = (
            torch.zeros_like(assigned),
            torch.from_numpy(np.concatenate(runner.plan.truth)),
            torch.cat(list(train.y)),
        )
        found = [
            *ways(runner.plan.learner, runner.state, runner.plan.test).values(),
            *(together(assigned, kind) for kind in kinds),
        ]
        print(f"{folder.name:72}" + "".join(f"{100 * value:8.1f}" for value in found))


def finished(folder: Path) -> BlockRunner:
    runner = BlockRunner(build_experiment(load(folder / "config.toml")).plan)
    latest = RunFolder.open(folder).latest()
    assert latest is not None, f"{folder} has no checkpoint"
    runner.load(latest[0])
    return runner


def ways(learner: Learner, state: State, test: Block) -> dict[str, float]:
    """Accuracy by what a client makes of its centers."""
    found = {
        "blend": answers(learner, blend(state), test),
        "outputs": mixed_outputs(learner, state, test),
        "largest": answers(learner, pick(state.centers_CSP, state.mixture_CS.argmax(1)), test),
    }
    return {name: accuracy(outputs, test) for name, outputs in found.items()}


def answers(learner: Learner, model_CP: Tensor, test: Block) -> list[Tensor]:
    return [learner.outputs(model_P, x) for model_P, x in zip(model_CP, test.x, strict=True)]


def mixed_outputs(learner: Learner, state: State, test: Block) -> list[Tensor]:
    by_cluster = [answers(learner, centers_CP, test) for centers_CP in state.centers_CSP.unbind(1)]
    mixture = zip(state.mixture_CS, *by_cluster, strict=True)
    return [
        sum((u * output.softmax(1) for u, output in zip(u_S, outputs, strict=True)), torch.zeros(1))
        for u_S, *outputs in mixture
    ]


def accuracy(outputs: list[Tensor], test: Block) -> float:
    right = [
        (output.argmax(1) == y).double().mean() for output, y in zip(outputs, test.y, strict=True)
    ]
    return float(torch.stack(right).mean())


def together(assigned: Tensor, kind: Tensor) -> float:
    """The share of the examples that are in the cluster which most examples of their kind are in."""
    return sum(int(assigned[kind == k].bincount().max()) for k in set(kind.tolist())) / len(kind)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([Path(folder) for folder in sys.argv[1:]])
