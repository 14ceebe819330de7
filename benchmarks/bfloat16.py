"""Accuracy and bytes with bfloat16: in training, on the wire, and in both.

    python benchmarks/bfloat16.py                     about an hour of one core
    python benchmarks/bfloat16.py --records runs.jsonl

Prints the rows of the table in docs/performance.md: FedAvg on IID data, a ring of clients, one
worker. All variants of a seed have the same examples, first models and batches. With --records,
each run that ends adds a line to the file, and a run that has a line there is not repeated.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import fedspd

SEEDS = (0, 1, 2)
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    'precision = "bf16"': {"precision": "bf16"},
    'exchange.dtype = "bfloat16"': {"exchange": {"dtype": "bfloat16"}},
    "both": {"precision": "bf16", "exchange": {"dtype": "bfloat16"}},
}
CASES: dict[str, dict[str, Any]] = {
    "CIFAR-10, small CNN": {
        "clients": 3,
        "rounds": 10,
        "data": {"name": "cifar10", "mixture": "iid", "examples": 1000, "test_examples": 2000},
        "model": {"name": "cifar-cnn", "small": True},
        "training": {"lr": 0.02, "epochs": 1},
    },
    "MNIST, CNN": {
        "clients": 8,
        "rounds": 15,
        "data": {"name": "mnist", "mixture": "iid", "examples": 300, "test_examples": 1000},
    },
}


def main() -> None:
    """Make the runs that have no record yet, and print one row for every case and variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, help="a file of records, one line per run")
    records = Records(parser.parse_args().records)
    for case, config in CASES.items():
        for seed in SEEDS:  # all variants of a seed first: their differences count
            for name, variant in VARIANTS.items():
                if (case, name, seed) not in records.found:
                    records.add((case, name, seed), run(config, variant, seed))
        for name in VARIANTS:
            print(row(records, case, name), flush=True)


class Records:
    """Accuracy in percent and megabytes of every run, by case, variant and seed."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.found: dict[tuple[str, str, int], tuple[float, float]] = {}
        if file is not None and file.exists():
            for line in file.read_text("utf-8").splitlines():
                case, name, seed, accuracy, megabytes = json.loads(line)
                self.found[case, name, seed] = accuracy, megabytes

    def add(self, key: tuple[str, str, int], result: tuple[float, float]) -> None:
        """Add a run, to the file too."""
        self.found[key] = result
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps([*key, *result]) + "\n")


def row(records: Records, case: str, name: str) -> str:
    """Return a row of the table."""
    accuracy, baseline = (
        [records.found[case, which, seed][0] for seed in SEEDS] for which in (name, "float32")
    )
    pairs = zip(accuracy, baseline, strict=True)
    paired = "" if name == "float32" else ", ".join(f"{a - b:+.1f}" for a, b in pairs)
    summary = f"{mean(accuracy):.1f} ± {stdev(accuracy):.1f}"
    return f"| {case} | {name} | {summary} | {paired} | {records.found[case, name, 0][1]:.1f} |"


def run(config: dict[str, Any], variant: dict[str, Any], seed: int) -> tuple[float, float]:
    """Return accuracy in percent and megabytes of one run."""
    shared = {"method": "fedavg", "seed": seed, "topology": {"kind": "ring"}}
    schedule = {"evaluate_every": config["rounds"]}
    summary = fedspd.run({**shared, **schedule, **config, **variant}, workers=1).summary
    return 100 * summary["accuracy"]["mean"], summary["bytes"]["point_to_point"] / 1e6


if __name__ == "__main__":
    main()
