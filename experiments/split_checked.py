"""What FedSPD-Split's check sees: how features tell clients apart, and how pure clients are.

    python experiments/split_checked.py        # runs what is missing, and prints the table

r is the correlation of the clients' coordinates with the features that change along them, R2 how
far clients gather at the corners. A run ends after the split. It is one line of
experiments/map/checked.json; its seed is one that the thresholds were chosen on.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from clusters_found import RIGHT, SIZES, WARMUP
from fedspd.algorithms import split_check
from fedspd.core.algorithm import Round
from map_runs import HELD_OUT_SEED, MLP, SUMMARIES, Cell, Tree, cell, merge, read, write_atomically
from map_runs import run_cell as run

PATH = SUMMARIES / "checked.json"
SEEN: dict[str, float] = {}
WATCHED = {"r": "correlation_with_features", "R2": "share_between_clusters"}


def watch(name: str, function: Callable[..., Round[Any]]) -> Callable[..., Round[Any]]:
    """Return a function that also writes down what its first client finds."""

    def watched(*args: Any) -> Round[Any]:
        found = yield from function(*args)
        SEEN[name] = float(found[0])
        return found

    return watched


def cells() -> Iterator[Cell]:
    """Yield the runs."""
    for (clients, examples), data in itertools.product(SIZES, ("fashion-mnist", "mnist")):
        size = {"clients": clients, "data": {"examples": examples, "test_examples": 10}}
        short = {"rounds": WARMUP + 1, "fedspd-split": {"warmup": WARMUP, "final_epochs": 0}}
        base = merge(MLP, {**size, **short, "training": {"lr": 0.1}})
        worlds = [world for world in RIGHT if not world.startswith("three")]
        for world, degree in itertools.product(worlds, (6, 3)):
            yield cell("checked", base, data, world, degree, HELD_OUT_SEED, "fedspd-split")


def table(records: Sequence[Tree]) -> list[str]:
    """Return the lines of the table: ranges over datasets and degrees, where S > 1 was found."""
    heads = [f"{clients} x {examples}: {name}" for clients, examples in SIZES for name in WATCHED]
    lines = [f"| world | {' | '.join(heads)} |", f"|---|{'--:|' * len(heads)}"]
    limits = [f"{math.sqrt(split_check.EXPLAINED + split_check.CHANCE / n):.2f}" for n, _ in SIZES]
    for world in dict.fromkeys(record["world"] for record in records):
        row = []
        for (clients, examples), name in itertools.product(SIZES, WATCHED):
            place = {"world": world, "clients": clients, "examples": examples}
            found = [r[name] for r in records if place.items() <= r.items() and r["R2"]]
            ends = f"{min(found):.2f} to {max(found):.2f}" if found else "S = 1"
            row.append(ends.replace("-", "−"))
        lines.append(f"| {world} | {' | '.join(row)} |")
    purities = [f"{split_check.GATHERED:.2f}"] * len(SIZES)
    thresholds = itertools.chain(*zip(limits, purities, strict=True))
    return [*lines, f"| *threshold* | {' | '.join(thresholds)} |"]


def main() -> None:
    for name, function in WATCHED.items():
        setattr(split_check, function, watch(name, getattr(split_check, function)))
    torch.set_num_threads(1)
    records = read(PATH)
    for one in list(cells())[len(records) :]:
        records.append({**run(one), **SEEN})
        write_atomically(PATH, records)
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
