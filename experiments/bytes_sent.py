"""What FedSPD-Split sends, its search included, beside FedAvg: the paper's CNN on MNIST, 30 rounds.

    python experiments/bytes_sent.py        # the table of docs/results.md

How much is sent follows from model, graph, rounds and S, not from how well a model is trained. So
clients have few examples and train for one epoch.
"""

from typing import Any

import torch

import fedspd
from map_runs import CNN, cell, merge

SHORT = {"rounds": 30, "data": {"examples": 100, "test_examples": 10}, "training": {"epochs": 1}}
NO_FINAL_PHASE = {"fedspd-split": {"final_epochs": 0}}
FORMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("labellings, pure", "S = 2", {"clusters": 2}),
    ("labellings, pure", "auto", {}),
    ("four rotations, pure", "S = 4", {"clusters": 4}),
    ("four rotations, pure", "auto", {}),
    ("iid", "auto", {}),
)


def setting(world: str, row: str, more: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a run."""
    return merge(cell("", merge(CNN, SHORT), "mnist", world, 6, 0, row).config, more)


def bytes_of(world: str, row: str, more: dict[str, Any]) -> tuple[dict[str, int], int | None]:
    """Return what a run sent, by multicast and point-to-point, and its number of clusters."""
    summary = fedspd.run(setting(world, row, more)).summary
    return summary["bytes"], summary["clusters"]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| world | clusters | found | multicast | point-to-point |\n|---|---|--:|--:|--:|")
    for world, name, more in FORMS:
        plain, _ = bytes_of(world, "fedavg", {})
        split, found = bytes_of(world, "fedspd-split", {**NO_FINAL_PHASE, **more})
        ratios = [f"{split[way] / plain[way]:.3f}" for way in ("multicast", "point_to_point")]
        print(f"| {world} | {name} | {found} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
