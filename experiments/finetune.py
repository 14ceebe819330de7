"""Fine-tune finished runs of FedAvg, as `fedspd sweep ... fedavg.finetune=10` would have done.

    python experiments/finetune.py FOLDER [EPOCHS]

FOLDER holds a comparison or a sweep. EPOCHS is 10 by default, as in FedSPD's final phase. The
script prints a line for each point: the accuracy of FedAvg as it ran, its accuracy with
fine-tuning, and the difference of the latter from FedSPD, paired by seed. All numbers are means
over seeds in per cent, with their 95 % intervals.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from centers import load_finished
from fedspd.algorithms.fedavg import FedAvg
from fedspd.reporting.columns import format_difference, format_interval
from fedspd.reporting.points import canonical_json, format_point
from fedspd.reporting.runs import Run, read_runs
from fedspd.reporting.selection import select_comparable
from fedspd.reporting.statistics import confidence_interval, paired_difference

Scores = dict[int, float | None]  # by seed


def main(folder: Path, epochs: int = 10) -> None:
    """Print a line for each point of the comparison."""
    runs, _ = select_comparable(read_runs([folder])[0])
    for point, there in by_point(runs).items():
        plain, fedspd = (scores(there, method) for method in ("fedavg", "fedspd"))
        fedavg_runs = [run for run in there if run.method == "fedavg"]
        tuned: Scores = {run.seed: finetuned_accuracy(run, epochs) for run in fedavg_runs}
        intervals = (confidence_interval(list(found.values())) for found in (plain, tuned))
        before, after = map(format_interval, intervals)
        difference = format_difference(paired_difference(tuned, fedspd))
        print(f"{point:48}{before:>14}{after:>14}{difference:>16}", flush=True)


def by_point(runs: list[Run]) -> dict[str, list[Run]]:
    """Return the runs by the point at which they stand."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(canonical_json(run.point), []).append(run)
    return {format_point(there[0].point): there for there in found.values()}


def scores(runs: list[Run], method: str) -> Scores:
    """Return the mean accuracy of the method's runs by seed."""
    return {run.seed: run.result["accuracy"]["mean"] for run in runs if run.method == method}


def finetuned_accuracy(run: Run, epochs: int) -> float:
    """Return the mean accuracy after a final phase with fine-tuning, which changes nothing else."""
    runner = load_finished(run.folder)
    runner.plan = replace(runner.plan, algorithm=FedAvg(finetune=epochs))
    runner.finish(run.config["rounds"] + 1)
    return float(runner.measure().accuracy_C.mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
