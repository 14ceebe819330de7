"""How often FedSPD-Split finds the right number of clusters, over worlds, sizes and held-out seeds.

    python experiments/clusters_found.py --seeds 5      # runs what is missing
    python experiments/clusters_found.py --table        # the table of docs/results.md

A run ends after the split, which follows a warm-up of one round: the search is in round 1. It is
one line of experiments/map/clusters.json; seeds
begin at 2000, where nothing was chosen.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from map_runs import MLP, SUMMARIES, WORLDS, Cell, Tree, cell, merge, read, run_missing

FIRST_SEED, ROUNDS, WARMUP = 2000, 2, 1
PATH = SUMMARIES / "clusters.json"
SIZES = ((20, 300), (100, 60), (100, 20))
DEGREES = (6, 3)
THREE = {"mixture": "rotation", "rotations": [0, 90, 180], "shares": "pure"}
RIGHT = {  # the number of clusters that is best: a body that has learnt absorbs two rotations
    "iid": 1,
    "Dirichlet 0.4": 1,
    "parity, mixed": 1,
    "rotation, mixed": 1,
    "labellings, mixed": 2,
    "labellings, pure": 2,
    "four labels swapped, mixed": 2,
    "four labels swapped, pure": 2,
    "three rotations, pure": 3,
    "four rotations, pure": 4,
}


def cells(seeds: int) -> Iterator[Cell]:
    """Yield the runs, seed by seed."""
    WORLDS["three rotations, pure"] = THREE
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for data in ("fashion-mnist", "mnist"):
            for clients, examples in SIZES:
                size = {"clients": clients, "data": {"examples": examples, "test_examples": 10}}
                short = {"rounds": ROUNDS, "fedspd-split": {"warmup": WARMUP, "final_epochs": 0}}
                base = merge(MLP, {**size, **short, "training": {"lr": 0.1}})
                for world, degree in itertools.product(RIGHT, DEGREES):
                    yield cell("clusters", base, data, world, degree, seed, "fedspd-split")


def table(records: Sequence[Tree]) -> list[str]:
    """Return the lines of the table: runs with the right number, and what the others found."""
    columns = list(itertools.product(SIZES, DEGREES))
    heads = [f"{clients} x {examples}, degree {degree}" for (clients, examples), degree in columns]
    lines = [f"| world | right | {' | '.join(heads)} |", f"|---|--:|{'--:|' * len(heads)}"]
    for world, right in RIGHT.items():
        found = []
        for (clients, examples), degree in columns:
            place = {"world": world, "clients": clients, "examples": examples, "degree": degree}
            own = [r["clusters"] for r in records if place.items() <= r.items()]
            wrong = Counter(own) - Counter({right: len(own)})
            others = ", ".join(f"{count} x S = {S}" for S, count in sorted(wrong.items()))
            found.append(f"{len(own) - sum(wrong.values())} of {len(own)}" * bool(own))
            found[-1] += f" ({others})" * bool(others)
        lines.append(f"| {world} | {right} | {' | '.join(found)} |")
    right_runs = sum(r["clusters"] == RIGHT[r["world"]] for r in records)
    return [*lines, "", f"Right in {right_runs} of {len(records)} runs."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print("\n".join(table(read(PATH))))
    else:
        run_missing(list(cells(given.seeds)), PATH, given.workers)


if __name__ == "__main__":
    main()
