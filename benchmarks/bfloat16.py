"""Accuracy and bytes with bfloat16: in training, on the wire, and in both.

Prints the rows of the table in docs/performance.md: FedAvg on IID data, a ring of clients, one
worker. All variants of a seed have the same examples, first models and batches.
"""

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
    "MNIST, CNN": {
        "clients": 8,
        "rounds": 15,
        "data": {"name": "mnist", "mixture": "iid", "examples": 300, "test_examples": 1000},
    },
    "CIFAR-10, small CNN": {
        "clients": 3,
        "rounds": 12,
        "data": {"name": "cifar10", "mixture": "iid", "examples": 2000, "test_examples": 3000},
        "model": {"name": "cifar-cnn", "small": True},
        "training": {"lr": 0.02, "epochs": 1},
    },
}


def main() -> None:
    """Print one row for every case and variant."""
    for case, config in CASES.items():
        baseline = [run(config, {}, seed) for seed in SEEDS]
        for name, variant in VARIANTS.items():
            found = [run(config, variant, seed) for seed in SEEDS] if variant else baseline
            accuracy = [100 * summary["accuracy"]["mean"] for summary in found]
            difference = [
                own - 100 * other["accuracy"]["mean"]
                for own, other in zip(accuracy, baseline, strict=True)
            ]
            megabytes = found[0]["bytes"]["point_to_point"] / 1e6
            paired = ", ".join(f"{value:+.1f}" for value in difference)
            print(f"| {case} | {name} | {mean(accuracy):.1f} ± {stdev(accuracy):.1f} | "
                  f"{paired} | {megabytes:.1f} |", flush=True)  # fmt: skip


def run(config: dict[str, Any], variant: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the summary of one run."""
    shared = {"method": "fedavg", "seed": seed, "topology": {"kind": "ring"}}
    schedule = {"evaluate_every": config["rounds"]}
    return fedspd.run({**shared, **schedule, **config, **variant}, workers=1).summary


if __name__ == "__main__":
    main()
