"""FedAvg with finetuning, from finished runs of FedAvg: what `fedspd sweep ... fedavg.finetune=10` gives, without training anew.

    python experiments/finetune.py FOLDER [EPOCHS]

FOLDER is that of a comparison or a sweep, EPOCHS is 10 by default, as in FedSPD's final phase. One line for each point,
in per cent: FedAvg as it ran, with finetuning, and the difference of the latter to FedSPD, paired by seed; means over
seeds with their 95 % intervals.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from centers import finished
from fedspd.algorithms.fedavg import FedAvg
from fedspd.reporting.points import canonical_json, format_point
from fedspd.reporting.runs import Run, read_runs
from fedspd.reporting.selection import select_comparable
from fedspd.reporting.statistics import confidence_interval, paired_difference
from fedspd.reporting.tables import format_difference, format_interval

Scores = dict[int, float | None]  # by seed


def main(folder: Path, epochs: int = 10) -> None:
    runs, _ = select_comparable(read_runs([folder])[0])
    for place, there in by_point(runs).items():
        plain, fedspd = (scores(there, method) for method in ("fedavg", "fedspd"))
        tuned: Scores = {
            run.seed: finetuned(run, epochs) for run in there if run.method == "fedavg"
        }
        means = [
            format_interval(confidence_interval(list(scores.values()))) for scores in (plain, tuned)
        ]
        difference = format_difference(paired_difference(tuned, fedspd))
        print(f"{place:48}{means[0]:>14}{means[1]:>14}{difference:>16}", flush=True)


def by_point(runs: list[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(canonical_json(run.point), []).append(run)
    return {format_point(there[0].point): there for there in found.values()}


def scores(runs: list[Run], method: str) -> Scores:
    return {run.seed: run.result["accuracy"]["mean"] for run in runs if run.method == method}


def finetuned(run: Run, epochs: int) -> float:
    """Accuracy, mean over clients: the final phase is all that finetuning changes."""
    runner = finished(run.folder)
    runner.plan = replace(runner.plan, algorithm=FedAvg(finetune=epochs))
    runner.finish(run.config["rounds"] + 1)
    return float(runner.measure().accuracy_C.mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
