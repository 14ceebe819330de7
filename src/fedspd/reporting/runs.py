"""Which runs can be compared: `gather` reads their records, `comparable` keeps those that have the same data."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedspd.core.errors import StorageError
from fedspd.core.imports import options_table
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

Numbers = Sequence[float | None]
TABLES = ("data", "topology", "model", "training")  # of a config; every other table is a method's
DEFAULT = "default"  # what a run was told by a key that its config does not have
NAMED = 3  # unfinished runs of one folder; of more, only the number is told


@dataclass(frozen=True)
class RoundScores:
    """A round that was tested: the mean accuracy over clients, and the point-to-point bytes sent until then."""

    round: int
    accuracy: float | None
    bytes: int


@dataclass(frozen=True)
class Run:
    """A finished run, as its records tell it."""

    folder: Path
    about: Json
    partition: Json
    result: Json
    history: list[RoundScores]
    point: Json  # the keys in which runs differ, besides method and seed, with their values here

    @property
    def config(self) -> Json:
        return dict(self.about["config"])

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def shared_point(self) -> Json:
        return shared(self.method, self.point)

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def label(self) -> str:
        return f"{label(self.method, self.point)}, seed {self.seed}"


def shared(method: str, point: Json) -> Json:
    """The point without the method's own options: where a method that has no such options stands."""
    return {
        key: value
        for key, value in point.items()
        if not key.startswith(f"{options_table(method)}.")
    }


def label(method: str, point: Json) -> str:
    return f"{method}, {spot(point)}" if point else method


def spot(point: Json) -> str:
    return ", ".join(f"{key}={value}" for key, value in point.items())


def distinct(points: Iterable[Json]) -> list[Json]:
    return list({canonical(point): point for point in points}.values())


def canonical(point: Json) -> str:
    """The same text for equal points: in any order of their keys, and 4 is 4.0."""
    return json.dumps(
        {key: float(value) if type(value) is int else value for key, value in point.items()},
        sort_keys=True,
    )


def mean(numbers: Numbers) -> float | None:
    """Of those that are known."""
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else None


def gather(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The finished runs in these run and comparison folders, and what is to be said of the others."""
    found = {folder.resolve(): (folder, point) for folder, point in _run_folders(folders)}
    unfinished = [folder for folder, _ in found.values() if not (folder / "result.json").exists()]
    runs = [_read(folder, point) for folder, point in found.values() if folder not in unfinished]
    if not runs:
        raise StorageError(
            f"There is nothing to report: none of the {len(found)} runs is finished."
        )
    return runs, _left_out(unfinished)


def _left_out(unfinished: list[Path]) -> list[str]:
    by_parent: dict[Path, list[Path]] = {}
    for folder in unfinished:
        by_parent.setdefault(folder.parent, []).append(folder)
    notes = []
    for parent, those in by_parent.items():
        each = [f"'{folder}' is left out: the run is not finished." for folder in those]
        notes += (
            each
            if len(each) <= NAMED
            else [f"{len(each)} runs in '{parent}' are left out: they are not finished."]
        )
    return notes


def _run_folders(folders: Sequence[Path]) -> Iterator[tuple[Path, Json]]:
    for folder in folders:
        if (folder / "compare.json").exists():
            points = RunFolder(folder).read("compare.json").get("points", {})
            yield from ((folder / name, point) for name, point in points.items())
        else:
            yield RunFolder.open(folder).folder, {}


def _read(folder: Path, point: Json) -> Run:
    record = RunFolder.open(folder)
    about, partition, result = (
        record.read(f"{name}.json") for name in ("run", "partition", "result")
    )
    return Run(folder, about, partition, result, _history(record), point)


def _history(record: RunFolder) -> list[RoundScores]:
    moments, sent = [], 0
    for event in record.events():
        sent += event["bytes"]["point_to_point"]
        if event["event"] == "round" and "accuracy" in event:
            moments.append(RoundScores(event["round"], mean(event["accuracy"]), sent))
    return moments


def comparable(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The most runs that have the same data, seed by seed, each but once; and a sentence about each other one."""
    groups: dict[str, list[Run]] = {}
    for run in _beside_data_sweeps(runs):
        groups.setdefault(canonical(_data(run)), []).append(run)
    largest = max(groups.values(), key=len)
    notes = [
        _other_data(run, largest[0])
        for group in groups.values()
        if group is not largest
        for run in group
    ]
    same_split, more = _same_split(largest)
    once, repeats = _once(_placed(same_split))
    return once, notes + more + repeats


def _beside_data_sweeps(runs: Sequence[Run]) -> list[Run]:
    """Where a sweep has declared that data vary, every other run stands at the point of its own data."""
    declared = dict.fromkeys(key for run in runs for key in run.point if _about_data(key))
    return [
        replace(run, point={**run.point, **_values(run, declared.keys() - run.point.keys())})
        for run in runs
    ]


def _values(run: Run, keys: Iterable[str]) -> Json:
    told = flat(run.config)
    return {key: told.get(key, DEFAULT) for key in sorted(keys)}


def _data(run: Run) -> Json:
    """Everything that the data follow from, but the seed and what a sweep has declared to vary."""
    if any(map(_about_data, run.point)):
        return {
            key: value
            for key, value in flat(run.config).items()
            if _about_data(key) and key not in run.point
        }
    return {
        "sources": run.partition["sources"],
        **run.partition["options"],
        "holdout_clients": run.config.get("holdout_clients", 0),
    }


def _about_data(key: str) -> bool:
    return key in ("clients", "holdout_clients") or key.startswith("data.")


def _other_data(run: Run, other: Run) -> str:
    one, two = _data(run), _data(other)
    keys = [key for key in {**one, **two} if one.get(key) != two.get(key)]
    differing = "; ".join(f"{key}: {_shown(key, one)}, there {_shown(key, two)}" for key in keys)
    return (
        f"'{run.folder}' is left out: its data differ from those of '{other.folder}' ({differing})."
    )


def _shown(key: str, data: Json) -> str:
    if key == "sources":
        return " and ".join(
            f"{source['name']} {source['sha256'][:8]}" for source in data.get(key, [])
        )
    return str(data.get(key))


def _same_split(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """One seed gives one split: whoever has another than most is left out."""
    hashes: dict[str, Counter[str]] = {}
    for run in runs:
        hashes.setdefault(_split(run), Counter())[run.partition["hash"]] += 1
    usual = {split: count.most_common(1)[0][0] for split, count in hashes.items()}
    others = [run for run in runs if run.partition["hash"] != usual[_split(run)]]
    notes = [
        f"'{run.folder}' is left out: its split of the data for seed {run.seed} has the hash {run.partition['hash'][:12]}, "
        f"that of the others {usual[_split(run)][:12]}."
        for run in others
    ]
    return [run for run in runs if run not in others], notes


def _split(run: Run) -> str:
    return f"{run.seed} {canonical({key: value for key, value in run.point.items() if _about_data(key)})}"


def _once(runs: list[Run]) -> tuple[list[Run], list[str]]:
    first: dict[tuple[str, int, str], Run] = {}
    notes = []
    for run in runs:
        kept = first.setdefault((run.method, run.seed, canonical(run.point)), run)
        if kept is not run:
            notes.append(f"'{run.folder}' is left out: it repeats '{kept.folder}'.")
    return list(first.values()), notes


def _placed(runs: list[Run]) -> list[Run]:
    """Each run at its point: what a sweep declared, then whatever else differs. A key that is not given says the default."""
    told = [_settings(run) for run in runs]
    keys = dict.fromkeys(key for settings in told for key in settings)
    own = {(run.method, key) for run, settings in zip(runs, told, strict=True) for key in settings}

    def told_of(run: Run, settings: Json) -> Json:
        return {
            key: settings.get(key, DEFAULT)
            for key in keys
            if (run.method, key) in own or not _of_a_method(key)
        }

    full = [told_of(run, settings) for run, settings in zip(runs, told, strict=True)]
    differing = [
        key
        for key in keys
        if len({canonical({key: settings[key]}) for settings in full if key in settings}) > 1
    ]
    return [
        replace(
            run,
            point={
                **run.point,
                **{
                    key: settings[key]
                    for key in differing
                    if key in settings and key not in run.point
                },
            },
        )
        for run, settings in zip(runs, full, strict=True)
    ]


def _of_a_method(key: str) -> bool:
    table, dot, _ = key.partition(".")
    return bool(dot) and table not in TABLES


def _settings(run: Run) -> Json:
    """What a run was told, but its method and seed, its data, which are the same, and the options of other methods."""
    kept = {
        key: value
        for key, value in run.config.items()
        if not isinstance(value, dict) or key in (*TABLES, options_table(run.method))
    }
    return {
        key: value
        for key, value in flat(kept).items()
        if key not in ("method", "seed") and not _about_data(key)
    }


def flat(tree: Json, above: str = "") -> Json:
    found: Json = {}
    for key, value in tree.items():
        found |= (
            flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
        )
    return found
