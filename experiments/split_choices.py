"""What FedSPD-Split's choices are worth: the method with one of them changed, beside it as it is.

    python experiments/split_choices.py        # runs what is missing, and prints the tables

A run is one line of experiments/map/choices.json. Its seeds are 2000 and 2001, where nothing was
chosen. The first table has accuracies of 20 clients with 300 examples, the second one how often S
is right with 100 clients and 20 examples.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import map_runs
from clusters_found import FIRST_SEED, RIGHT, WARMUP
from fedspd.algorithms import fedspd_split, populations
from fedspd.algorithms.split_check import Verdict, judge_split
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.keys import Key
from map_runs import MLP, SUMMARIES, Cell, Tree, cell, merge, name_of, read, write_atomically

PATH = SUMMARIES / "choices.json"
SEEDS = (FIRST_SEED, FIRST_SEED + 1)
AS_IT_IS = "as it is"
LABELLINGS = ("labellings, mixed", "labellings, pure")
SPLIT_WORLDS = (*LABELLINGS, "four rotations, pure")
SEARCH_WORLDS = ("iid", "parity, mixed", *SPLIT_WORLDS)


def judge_with_bodies(*given: Any) -> Round[Verdict]:
    """Return the verdict of the check, with a body for each cluster."""
    verdict = yield from judge_split(*given)
    return Verdict(verdict.is_kept_C, torch.ones_like(verdict.is_kept_C))


def judge_with_one_body(*given: Any) -> Round[Verdict]:
    """Return the verdict of the check, with one body for all clusters."""
    verdict = yield from judge_split(*given)
    return Verdict(verdict.is_kept_C, torch.zeros_like(verdict.is_kept_C))


def keep_all(*given: Any) -> Round[Verdict]:
    """Return the verdict of the check on bodies, and keep every split."""
    verdict = yield from judge_split(*given)
    return Verdict(torch.ones_like(verdict.is_kept_C), verdict.has_own_bodies_C)


def find_signed(d_CFQ: Tensor, count: int, data: Block, key: Key) -> Round[tuple[Tensor, Tensor]]:
    """Return the directions v in descending order of v' A v."""
    V_CMQ, _ = yield from populations.find_directions(d_CFQ, count, data, key)
    unit_CFQ = populations.divide(d_CFQ, d_CFQ.norm(dim=2, keepdim=True))
    F, along_CFM = unit_CFQ.shape[1], unit_CFQ @ V_CMQ.transpose(1, 2)
    pairs_CM = (along_CFM.sum(1).square() - along_CFM.square().sum(1)) / (F * (F - 1))
    value_CM = (yield from populations.network_mean(pairs_CM[:, None], data))[:, 0]
    value_CM, order_CM = value_CM.sort(1, descending=True)
    return V_CMQ.gather(1, order_CM[:, :, None].expand_as(V_CMQ)), value_CM


# what is put in place of what, and the worlds in which it matters
CHANGES: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    AS_IT_IS: ({}, (*SPLIT_WORLDS, "rotation, mixed")),
    "V and D at the full rate": ({"V_RATE": 1.0, "D_RATE": 1.0}, SPLIT_WORLDS),
    "first D a third as long": ({"LENGTH": 1 / 3}, SPLIT_WORLDS),
    "a body for each cluster": ({"judge_split": judge_with_bodies}, LABELLINGS),
    "one body for all": ({"judge_split": judge_with_one_body}, ("four rotations, pure",)),
    "every split kept": ({"judge_split": keep_all}, ("rotation, mixed",)),
}
SEARCHES: dict[str, dict[str, Any]] = {
    AS_IT_IS: {},
    "v'Av, ratio 2.0": {"find_directions": find_signed, "LEAST_RATIO": 2.0},
    "v'Av, ratio 1.8": {"find_directions": find_signed},
}


def cells() -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yield the runs, each with what it changes."""
    rate = {"training": {"lr": 0.1}}
    few = {"clients": 100, "data": {"examples": 20, "test_examples": 10}}
    short = {"rounds": WARMUP + 1, "fedspd-split": {"warmup": WARMUP, "final_epochs": 0}}
    for seed, data in itertools.product(SEEDS, ("fashion-mnist", "mnist")):
        for name, (change, worlds) in CHANGES.items():
            for world in worlds:
                one = cell("choices", merge(MLP, rate), data, world, 3, seed, "fedspd-split")
                yield changed(one, name), change
        base = merge(MLP, {**rate, **few, **short})
        for (name, change), world in itertools.product(SEARCHES.items(), SEARCH_WORLDS):
            one = cell("choices", base, data, world, 3, seed, "fedspd-split")
            yield changed(one, name), change


def changed(one: Cell, name: str) -> Cell:
    """Return a run whose place says what is changed."""
    return Cell({**one.place, "choice": name}, one.config)


def run(one: Cell, change: dict[str, Any]) -> Tree:
    """Train with a change, and return the line of the run."""
    map_runs.last_run = None  # its rounds are those of another choice
    with ExitStack() as stack:
        for name, value in change.items():
            place = fedspd_split if hasattr(fedspd_split, name) else populations
            stack.enter_context(patch.object(place, name, value))
        return map_runs.run_cell(one)


def accuracies(records: Sequence[Tree]) -> list[str]:
    """Return the lines of a table: accuracy as it is, and what each change makes of it."""
    worlds = CHANGES[AS_IT_IS][1]
    datasets = dict.fromkeys(record["data"] for record in records)
    heads = list(itertools.product(datasets, worlds))
    lines = [f"| | {' | '.join(f'{data}: {world}' for data, world in heads)} |"]
    lines.append(f"|---|{'--:|' * len(heads)}")
    for name in CHANGES:
        row = []
        for data, world in heads:
            place = {"clients": MLP["clients"], "data": data, "world": world}
            own = [r for r in records if place.items() <= r.items()]
            scores = [r["accuracy"] for r in own if r["choice"] == name]
            plain = [r["accuracy"] for r in own if r["choice"] == AS_IT_IS]
            row.append(difference(scores, plain if name != AS_IT_IS else None))
        lines.append(f"| {name} | {' | '.join(row)} |")
    return lines


def difference(scores: Sequence[float], plain: Sequence[float] | None) -> str:
    """Return the mean of some scores, or of their differences to others."""
    if not scores:
        return ""
    if plain is None:
        return f"{sum(scores) / len(scores):.1f}"
    gains = [a - b for a, b in zip(scores, plain, strict=True)]
    return f"{sum(gains) / len(gains):+.1f}".replace("-", "−")


def searches(records: Sequence[Tree]) -> list[str]:
    """Return the lines of a table: in how many runs each search finds the right S."""
    lines = [f"| | {' | '.join(SEARCH_WORLDS)} |", f"|---|{'--:|' * len(SEARCH_WORLDS)}"]
    for name in SEARCHES:
        row = []
        for world in SEARCH_WORLDS:
            place = {"clients": 100, "choice": name, "world": world}
            found = [r["clusters"] for r in records if place.items() <= r.items()]
            row.append(f"{found.count(RIGHT[world])} of {len(found)}" if found else "")
        lines.append(f"| {name} | {' | '.join(row)} |")
    return lines


def main() -> None:
    torch.set_num_threads(1)
    records = read(PATH)
    done = {name_of(record) for record in records}
    for one, change in cells():
        if one.name not in done:
            records.append(run(one, change))
            write_atomically(PATH, records)
            print(f"{records[-1]['accuracy']:5.1f}  {one.name}", flush=True)
    print("\n".join([*accuracies(records), "", *searches(records)]))


if __name__ == "__main__":
    main()
