"""The map of results: every method in many worlds, by one command that continues where it stopped.

    python experiments/map_runs.py tune --workers 2   # rates and constants, first
    python experiments/map_runs.py a --workers 2      # then the parts: a, b, c, d
    python experiments/map_runs.py a --again fedspd-split   # a method that has changed
    python experiments/map_tables.py                  # the tables of docs/results.md

A run is one line of experiments/map/PART.json. A part that is started again goes on. Runs that are
made again wait in PART-again.json until all of them have ended, and then replace the older ones.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fedspd
from fedspd.config import load, validate
from fedspd.experiment.sharing import borrow_rounds, can_lend, rounds_key

Tree = dict[str, Any]
SUMMARIES = Path(__file__).parent / "map"
HELD_OUT_SEED = 1000
RATES = (0.025, 0.05, 0.1)
TUNED_WORLDS = ("labellings, mixed", "rotation, mixed")

WORLDS: dict[str, Tree] = {
    "rotation, mixed": {"mixture": "rotation"},
    "four rotations, pure": {
        "mixture": "rotation",
        "rotations": [0, 90, 180, 270],
        "shares": "pure",
    },
    "parity, mixed": {"mixture": "parity"},
    "Dirichlet 0.4": {"mixture": "dirichlet", "alpha": 0.4},
    "iid": {"mixture": "iid"},
    "labellings, mixed": {"mixture": "permutation"},
    "labellings, pure": {"mixture": "permutation", "shares": "pure"},
    "four labels swapped, mixed": {"mixture": "permutation", "swap": 4},
    "four labels swapped, pure": {"mixture": "permutation", "swap": 4, "shares": "pure"},
    "rotation and parity, mixed": {"mixture": "rotation+parity"},
}
METHODS: dict[str, Tree] = {
    "fedspd-split": {"method": "fedspd-split"},
    "fedavg": {"method": "fedavg"},
    "fedavg, fine-tuned": {"method": "fedavg", "fedavg": {"finetune": 10}},
    "fedavg, half-way": {"method": "fedavg", "fedavg": {"finetune": 10, "interpolate": "cv"}},
    "fedavg, head x 2": {"method": "fedavg", "training": {"head_rate": 2.0}},
    "fedem": {"method": "fedem"},
    "ifca": {"method": "ifca"},
    "fedsoft": {"method": "fedsoft"},
    "pfedme": {"method": "pfedme"},
    "facade": {"method": "facade"},
    "fedper": {"method": "fedper"},
    "fedrep": {"method": "fedrep"},
    "fedspd": {"method": "fedspd"},
    "fedspd, label-adjusted": {"method": "fedspd", "fedspd": {"score": "label-adjusted"}},
    "local": {"method": "local"},
}
CONSTANTS: dict[str, tuple[str, Sequence[float]]] = {  # of a method's own table
    "fedsoft": ("lambda", (0.01, 0.1, 1.0)),
    "pfedme": ("lambda", (5.0, 15.0, 45.0)),
}
MLP: Tree = {
    "clients": 20,
    "rounds": 30,
    "data": {"examples": 300, "test_examples": 400},
    "model": {"name": "mlp"},
}
CNN: Tree = {**MLP, "rounds": 12, "model": {"name": "cnn"}}
SMALL_DEVICES: Tree = {
    "clients": 100,
    "rounds": 30,
    "data": {"test_examples": 90},
    "model": {"name": "mlp"},
}
CIFAR: Tree = {
    "clients": 15,
    "rounds": 15,
    "data": {"examples": 300, "test_examples": 400},
    "model": {"name": "cifar-cnn", "small": True},
    "training": {"decay": 0.85},
}


@dataclass(frozen=True)
class Cell:
    """One run of the map: where it stands, and its config."""

    place: Tree  # part, world, data, degree, clients, examples, seed, method
    config: Tree

    @property
    def name(self) -> str:
        """The place as one line."""
        return json.dumps(self.place, sort_keys=True)


def cell(part: str, base: Tree, data: str, world: str, degree: int, seed: int, row: str) -> Cell:
    """Return a run; rivals that do not find S are given the true number of populations."""
    examples = base["data"]["examples"]
    place = {
        "part": part,
        "data": data,
        "world": world,
        "degree": degree,
        "clients": base["clients"],
        "examples": examples,
        "seed": seed,
        "method": row,
    }
    config = merge(base, METHODS[row])
    config = merge(
        config,
        {
            "seed": seed,
            "evaluate_every": base["rounds"],
            "data": {"name": data, **WORLDS[world]},
            "topology": {"kind": "er", "degree": degree},
        },
    )
    if config["method"] != "fedspd-split":
        config["clusters"] = 4 if "four rotations" in world or "and parity" in world else 2
    return Cell(place, config)


def merge(base: Tree, more: Tree) -> Tree:
    """Return the tree with the values of another one, table by table."""
    merged = dict(base)
    for key, value in more.items():
        is_table = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if is_table else value
    return merged


# ---- the parts


def part_a() -> Iterator[Cell]:
    """MLP on two datasets and nine worlds, degree 3 and 6, three seeds, all methods."""
    worlds = [world for world in WORLDS if world != "rotation and parity, mixed"]
    for seed in range(3):
        for data, degree in (
            ("fashion-mnist", 6),
            ("mnist", 6),
            ("fashion-mnist", 3),
            ("mnist", 3),
        ):
            for world in worlds:
                for row in METHODS:
                    yield cell("a", tuned(MLP, row, data), data, world, degree, seed, row)


def part_b() -> Iterator[Cell]:
    """The paper's CNN on Fashion-MNIST, the strongest methods of part a and FedSPD."""
    worlds = (
        "labellings, mixed",
        "labellings, pure",
        "rotation, mixed",
        "four rotations, pure",
        "parity, mixed",
        "Dirichlet 0.4",
    )
    for seed in range(3):
        for world in worlds:
            for row in STRONGEST:
                yield cell("b", CNN, "fashion-mnist", world, 6, seed, row)


STRONGEST = (
    "fedspd-split",
    "fedavg",
    "fedavg, fine-tuned",
    "fedavg, half-way",
    "fedem",
    "ifca",
    "facade",
    "fedper",
    "fedrep",
    "fedspd",
)


def part_c() -> Iterator[Cell]:
    """Many small devices: 100 clients with 20 and with 60 examples each."""
    worlds = ("labellings, mixed", "labellings, pure", "rotation, mixed", "Dirichlet 0.4")
    for seed in range(3):
        for degree in (6, 3):
            for examples in (60, 20):
                base = merge(SMALL_DEVICES, {"data": {"examples": examples}})
                for world in worlds:
                    for row in METHODS:
                        base_of_row = tuned(base, row, "fashion-mnist")
                        yield cell("c", base_of_row, "fashion-mnist", world, degree, seed, row)


def part_d() -> Iterator[Cell]:
    """CIFAR-10 with the small CNN, one seed, five methods."""
    for world in ("labellings, mixed", "rotation and parity, mixed"):
        for row in ("fedspd-split", "fedavg", "fedavg, fine-tuned", "facade", "fedspd"):
            yield cell("d", CIFAR, "cifar10", world, 6, 0, row)


def part_tune() -> Iterator[Cell]:
    """Each method's rate and main constant, by dataset, on a held-out seed in two worlds."""
    for row in METHODS:
        for options in choices(row):
            base = merge(MLP, options)
            for data, world in itertools.product(("fashion-mnist", "mnist"), TUNED_WORLDS):
                found = cell("tune", base, data, world, 6, HELD_OUT_SEED, row)
                yield Cell({**found.place, "options": options}, found.config)


def choices(row: str) -> Iterator[Tree]:
    """Yield the options that are tried for a method."""
    name, values = CONSTANTS.get(row, ("", (None,)))
    for rate in RATES:
        for value in values:
            table = {} if value is None else {METHODS[row]["method"]: {name: value}}
            yield {"training": {"lr": rate}, **table}


PARTS = {"tune": part_tune, "a": part_a, "b": part_b, "c": part_c, "d": part_d}


def tuned(base: Tree, row: str, data: str) -> Tree:
    """Return the config with the options that were best for a dataset on the held-out seed."""
    path = SUMMARIES / "tune.json"
    if not path.exists():
        sys.exit(f"{path}: no such file. Run the part 'tune' first.")
    by_options: dict[str, list[float]] = {}
    for record in json.loads(path.read_text()):
        if (record["method"], record["data"]) == (row, data):
            by_options.setdefault(json.dumps(record["options"]), []).append(record["accuracy"])
    best = max(by_options, key=lambda options: sum(by_options[options]))
    return merge(base, json.loads(best))


# ---- running


def run_cell(one: Cell) -> Tree:
    """Train, and return the line of the run."""
    torch.set_num_threads(1)
    summary = train(one.config).summary
    return {
        **one.place,
        "accuracy": round(100 * summary["accuracy"]["mean"], 3),
        "before_final": round(100 * summary["accuracy_before_final_phase"]["mean"], 3),
        "worst": round(100 * summary["accuracy"]["worst"], 3),
        "clusters": summary["clusters"],
        "purity": summary["purity"],
        "rand": summary["adjusted_rand_index"],
        "bytes": summary["bytes"],
        "steps": summary["steps"],
        "seconds": summary["seconds"],
    }


def train(config: Tree) -> fedspd.Result:
    """Run; a config that differs from the last one in its final phase alone shares its rounds."""
    global last_run
    settings, lender = validate(config), last_run
    key = None if lender is None else rounds_key(load(lender.folder / "config.toml"))
    has_same = key is not None and key == rounds_key(settings)
    if lender is None or not has_same or not can_lend(lender.folder, settings.device):
        last_run = fedspd.run(config)
        return last_run
    with tempfile.TemporaryDirectory() as folder:
        borrow_rounds(lender.folder, Path(folder) / "run", settings)
        return fedspd.run(out=Path(folder) / "run", resume=True)


last_run: fedspd.Result | None = None  # of this process


def run_part(part: str, workers: int, folder: Path = SUMMARIES) -> None:
    """Run what is missing of a part; its file is written after every run."""
    run_missing(list(PARTS[part]()), folder / f"{part}.json", workers)


def run_again(part: str, method: str, workers: int, folder: Path = SUMMARIES) -> None:
    """Run all cells of one method again; the new runs replace the old ones when all have ended."""
    path, waiting = folder / f"{part}.json", folder / f"{part}-again.json"
    run_missing([one for one in PARTS[part]() if one.place["method"] == method], waiting, workers)
    new = {name_of(record): record for record in read(waiting)}
    old = read(path)
    known = {name_of(record) for record in old}
    more = [record for name, record in new.items() if name not in known]
    write_atomically(path, [new.get(name_of(record), record) for record in old] + more)
    waiting.unlink()


def run_missing(cells: Sequence[Cell], path: Path, workers: int) -> None:
    """Run the cells that a file does not hold yet, and write it after every run."""
    done = {name_of(record): record for record in read(path)}
    missing = [one for one in cells if one.name not in done]
    print(f"{path.stem}: {len(cells) - len(missing)} of {len(cells)} runs are done", flush=True)
    start = time.monotonic()
    for count, record in enumerate(run_all(missing, workers), 1):
        done[name_of(record)] = record
        write_atomically(path, [done[one.name] for one in cells if one.name in done])
        left = (time.monotonic() - start) / count * (len(missing) - count) / 60
        what = "{data}, {world}, degree {degree}, seed {seed}, {method}".format(**record)
        print(f"{record['accuracy']:5.1f}  {what}  ({left:.0f} min left)", flush=True)


def run_all(cells: Sequence[Cell], workers: int) -> Iterator[Tree]:
    """Yield the lines of the runs as they end."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=fork, max_tasks_per_child=None) as pool:
        waiting, running = list(reversed(cells)), set[Future[Tree]]()
        while waiting or running:
            while waiting and len(running) < workers:
                running.add(pool.submit(run_cell, waiting.pop()))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in ended)


RESULTS = ("accuracy", "before_final", "worst", "clusters", "purity", "rand", "bytes", "steps")


def name_of(record: Tree) -> str:
    """Return the name of the cell that a record belongs to."""
    others = (*RESULTS, "seconds")
    return json.dumps({k: v for k, v in record.items() if k not in others}, sort_keys=True)


def read(path: Path) -> list[Tree]:
    """Return the runs that have ended."""
    records: list[Tree] = json.loads(path.read_text()) if path.exists() else []
    return records


def write_atomically(path: Path, records: Sequence[Tree]) -> None:
    """Write the runs, one line each, so that a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n"
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--again", choices=METHODS, help="Run one method's cells again.")
    given = parser.parse_args()
    if given.again:
        run_again(given.part, given.again, given.workers)
    else:
        run_part(given.part, given.workers)


if __name__ == "__main__":
    main()
