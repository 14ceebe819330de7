"""Points: the settings that distinguish the compared runs.

A run is one method with one seed at one point, which maps dotted config keys to the run's values.
A sweep declares the keys that it varies; any other setting in which the runs differ joins them.
Methods are compared at the same shared point: the point without the method's own options, because
the other methods do not have them.
"""

import json
from collections.abc import Iterable

from fedspd.core.imports import SHARED_TABLES, options_table
from fedspd.storage.atomic import Json

DEFAULT = "default"  # the value of a key that a config leaves out


def without_own_options(method: str, point: Json) -> Json:
    """Return the point without the method's own options."""
    own = f"{options_table(method)}."
    return {key: value for key, value in point.items() if not key.startswith(own)}


def canonical_json(point: Json) -> str:
    """Return the same text for equal points: in any order of their keys, and with 4 for 4.0."""
    numbers = {key: float(value) if type(value) is int else value for key, value in point.items()}
    return json.dumps(numbers, sort_keys=True)


def distinct_points(points: Iterable[Json]) -> list[Json]:
    """Return every point once."""
    return list({canonical_json(point): point for point in points}.values())


def format_point(point: Json) -> str:
    """Return the point as 'key=value, key=value'."""
    return ", ".join(f"{key}={value}" for key, value in point.items())


def format_label(method: str, point: Json) -> str:
    """Return the method with its own options, under their short names, and its shared point."""
    shared = without_own_options(method, point)
    own = {key.partition(".")[2]: value for key, value in point.items() if key not in shared}
    return ", ".join([method, *(format_point(part) for part in (own, shared) if part)])


def is_data_key(key: str) -> bool:
    """Return whether the data of a run depend on this key."""
    return key in ("clients", "holdout_clients") or key.startswith("data.")


def is_method_option(key: str) -> bool:
    """Return whether the key belongs to the options of a method."""
    table, dot, _ = key.partition(".")
    return bool(dot) and table not in SHARED_TABLES
