"""Compare ways to use a FedSPD client's cluster centers before the final phase.

    python experiments/centers.py RUN_FOLDER...

The script prints a line for each finished run of FedSPD. The first columns are accuracies on the
clients' test examples, as means over clients in per cent:

    blend     one model, sum_s u_is c_is, as FedSPD has it
    outputs   the outputs of all centers, sum_s u_is softmax(f(x; c_is)), as FedEM has it
    largest   the center with the largest u_is

The others are shares of all training examples, in per cent:

    major     examples in the larger cluster
    truth     examples in the cluster that holds most examples of their true distribution
    label     examples in the cluster that holds most examples of their label

If `truth` is near 100, the clusters are the distributions. If `label` is near 100, they are sets of
labels. If both are near `major`, they are neither.
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

COLUMNS = ("blend", "outputs", "largest", "major", "truth", "label")


def main(folders: list[Path]) -> None:
    """Print a line for each run folder."""
    print(f"{'run':72}" + "".join(f"{name:>8}" for name in COLUMNS))
    for folder in folders:
        runner = load_finished(folder)
        scores = score_uses(runner.plan.learner, runner.state, runner.plan.test)
        values = [*scores.values(), *cluster_shares(runner)]
        print(f"{folder.name:72}" + "".join(f"{100 * value:8.1f}" for value in values))


def load_finished(folder: Path) -> BlockRunner:
    """Return a runner with the clients' states from the last checkpoint of a run."""
    runner = BlockRunner(build_experiment(load(folder / "config.toml")).plan)
    latest = RunFolder.open(folder).latest()
    assert latest is not None, f"{folder} has no checkpoint"
    runner.load(latest[0])
    return runner


# ---- accuracies


def score_uses(learner: Learner, state: State, test: Block) -> dict[str, float]:
    """Return the accuracy of each way to use the centers."""
    largest_CP = pick(state.centers_CSP, state.mixture_CS.argmax(1))
    outputs = {
        "blend": model_outputs(learner, blend(state), test),
        "outputs": mixed_outputs(learner, state, test),
        "largest": model_outputs(learner, largest_CP, test),
    }
    return {name: accuracy(found, test) for name, found in outputs.items()}


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


def cluster_shares(runner: BlockRunner) -> list[float]:
    """Return the shares `major`, `truth` and `label` of a run."""
    assignment_CE = runner.state.assignment_CE
    assigned = assignment_CE[assignment_CE >= 0]
    truth = torch.from_numpy(np.concatenate(runner.plan.truth))
    label = torch.cat(list(runner.plan.train.y))
    return [majority_share(assigned, kind) for kind in (torch.zeros_like(assigned), truth, label)]


def majority_share(assigned: Tensor, kind: Tensor) -> float:
    """Return the share of examples in the cluster that holds most examples of their kind."""
    largest = [int(assigned[kind == k].bincount().max()) for k in set(kind.tolist())]
    return sum(largest) / len(kind)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([Path(folder) for folder in sys.argv[1:]])
