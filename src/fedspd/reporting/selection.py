"""Decide which runs can be compared, say why the others cannot, and find what distinguishes them.

Runs can be compared if they have the same data and, for the same seed, the same partition.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fedspd.core.imports import SHARED_TABLES, options_table
from fedspd.reporting.points import (
    DEFAULT,
    canonical_json,
    is_data_key,
    is_method_option,
)
from fedspd.reporting.runs import Run
from fedspd.storage.atomic import Json, flatten


def select_comparable(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the largest group of comparable runs, and a note about every other run."""
    groups: dict[str, list[Run]] = {}
    for run in _add_swept_data(runs):
        groups.setdefault(canonical_json(_data_of(run)), []).append(run)
    largest = max(groups.values(), key=len)
    others = [run for group in groups.values() if group is not largest for run in group]
    notes = [_explain_other_data(run, largest[0]) for run in others]
    same_partition, partition_notes = _keep_usual_partition(largest)
    selected, repeat_notes = _drop_repeats(_add_differences(same_partition))
    return selected, notes + partition_notes + repeat_notes


# ---- the same data


def _add_swept_data(runs: Sequence[Run]) -> list[Run]:
    """If a sweep varies keys of the data, add the run's own values of these keys to every point."""
    swept = sorted({key for run in runs for key in run.point if is_data_key(key)})
    return [_extend_point(run, flatten(run.config), swept) for run in runs]


def _extend_point(run: Run, settings: Json, keys: Iterable[str]) -> Run:
    """Return the run with these settings at the end of its point, unless they are in it already."""
    added = {key: settings.get(key, DEFAULT) for key in keys if key not in run.point}
    return replace(run, point=run.point | added)


def _data_of(run: Run) -> Json:
    """Return everything that determines the data, except the seed and the swept keys."""
    if any(map(is_data_key, run.point)):
        config = flatten(run.config)
        fixed = [key for key in config if is_data_key(key) and key not in run.point]
        return {key: config[key] for key in fixed}
    return {
        "sources": run.partition["sources"],
        **run.partition["options"],
        "holdout_clients": run.config.get("holdout_clients", 0),
    }


def _explain_other_data(run: Run, other: Run) -> str:
    own, usual = _data_of(run), _data_of(other)
    keys = [key for key in {**own, **usual} if own.get(key) != usual.get(key)]
    differing = "; ".join(
        f"{key}: {_format_value(key, own)} instead of {_format_value(key, usual)}" for key in keys
    )
    return (
        f"'{run.folder}' is left out: its data differ from those of '{other.folder}' ({differing})."
    )


def _format_value(key: str, data: Json) -> str:
    if key != "sources":
        return str(data.get(key))
    return " and ".join(f"{source['name']} {source['sha256'][:8]}" for source in data.get(key, []))


# ---- the same partition


def _keep_usual_partition(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Keep the runs with the most frequent partition of their seed; note the others."""
    hashes: dict[str, Counter[str]] = {}
    for run in runs:
        hashes.setdefault(_partition_key(run), Counter())[run.partition["hash"]] += 1
    usual = {key: counter.most_common(1)[0][0] for key, counter in hashes.items()}
    kept, notes = [], []
    for run in runs:
        own, expected = run.partition["hash"], usual[_partition_key(run)]
        if own == expected:
            kept.append(run)
        else:
            notes.append(
                f"'{run.folder}' is left out: its partition of the data for seed {run.seed} "
                f"has the hash {own[:12]} instead of {expected[:12]}."
            )
    return kept, notes


def _partition_key(run: Run) -> str:
    """Return the same text for runs that must have the same partition."""
    data = {key: value for key, value in run.point.items() if is_data_key(key)}
    return f"{run.seed} {canonical_json(data)}"


# ---- what distinguishes the runs


def _add_differences(runs: list[Run]) -> list[Run]:
    """Extend every point by all other settings in which the runs differ.

    A key that a config leaves out counts as DEFAULT, but an option of a method counts only for runs
    of this method.
    """
    given = [_own_settings(run) for run in runs]
    keys = list(dict.fromkeys(key for settings in given for key in settings))
    known = {(run.method, key) for run, own in zip(runs, given, strict=True) for key in own}
    complete = [
        {
            key: own.get(key, DEFAULT)
            for key in keys
            if (run.method, key) in known or not is_method_option(key)
        }
        for run, own in zip(runs, given, strict=True)
    ]
    differing = [key for key in keys if _has_several_values(key, complete)]
    return [
        _extend_point(run, settings, [key for key in differing if key in settings])
        for run, settings in zip(runs, complete, strict=True)
    ]


def _has_several_values(key: str, settings: list[Json]) -> bool:
    return len({canonical_json({key: own[key]}) for own in settings if key in own}) > 1


def _own_settings(run: Run) -> Json:
    """Return the config without method, seed, data and the options of other methods."""
    tables = (*SHARED_TABLES, options_table(run.method))
    own = {k: v for k, v in run.config.items() if not isinstance(v, dict) or k in tables}
    return {
        key: value
        for key, value in flatten(own).items()
        if key not in ("method", "seed") and not is_data_key(key)
    }


# ---- every run once


def _drop_repeats(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Keep the first run of each method, seed and point."""
    first: dict[tuple[str, int, str], Run] = {}
    notes = []
    for run in runs:
        kept = first.setdefault((run.method, run.seed, canonical_json(run.point)), run)
        if kept is not run:
            notes.append(f"'{run.folder}' is left out: it repeats '{kept.folder}'.")
    return list(first.values()), notes
