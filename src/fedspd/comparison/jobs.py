"""Methods, seeds and grid points as a list of runs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedspd.config import (
    METHOD_TABLES,
    ExperimentConfig,
    as_dict,
    parse_override,
    set_key,
    validate,
)
from fedspd.core.errors import ConfigError
from fedspd.core.imports import options_table
from fedspd.storage.atomic import Json

OPTIONS_TABLES = {*METHOD_TABLES, "options"}


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    name: str
    config: ExperimentConfig
    point: Json  # the values of the swept keys


def jobs(
    base: ExperimentConfig,
    methods: Sequence[str],
    seeds: int,
    grid: dict[str, list[Any]] | None = None,
) -> list[Job]:
    """Every method with every seed at every point of the grid; one seed gives one split and one graph to all methods."""
    if seeds < 1:
        raise ConfigError(f"seeds = {seeds}: expected at least 1.")
    if not methods:
        raise ConfigError("methods = []: expected at least one method.")
    if len(set(methods)) < len(methods):
        raise ConfigError(f"methods = {','.join(methods)}: a method is named twice.")
    grid = grid or {}
    _check_grid(grid, methods)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    found: dict[str, Job] = {}
    for point, seed, method in itertools.product(points, range(seeds), methods):
        job = _job(base, method, base.seed + seed, point)
        if found.setdefault(job.name, job).config != job.config:
            raise ConfigError(f"Two runs would have the folder '{job.name}': rename a value.")
    return list(found.values())


def _check_grid(grid: dict[str, list[Any]], methods: Sequence[str]) -> None:
    for key, values in grid.items():
        table = key.partition(".")[0]
        if table in OPTIONS_TABLES and table not in map(options_table, methods):
            whose = "a method of your own, as module:Class" if table == "options" else table
            raise ConfigError(f"{key} cannot be swept without {whose}: add it to the methods.")
        if key in ("method", "seed"):
            raise ConfigError(f"'{key}' cannot be swept: a comparison takes {key}s instead.")
        if len({repr(value) for value in values}) < len(values):
            raise ConfigError(f"{key}={','.join(map(str, values))}: a value is given twice.")


def _job(base: ExperimentConfig, method: str, seed: int, point: Json) -> Job:
    others = OPTIONS_TABLES - {options_table(method)}
    point = {key: value for key, value in point.items() if key.partition(".")[0] not in others}
    tree = as_dict(base)
    for key, value in point.items():
        set_key(tree, key, value)
    config = validate({**tree, "method": method, "seed": seed})
    place = "".join(f"{key}={value}," for key, value in point.items())
    return Job(f"{place}{method.replace(':', '.')},seed={seed}".replace("/", "_"), config, point)


def parse_grid(words: Sequence[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Of the words of a command line, those with one value, and those with several: a=1 b=2,4,6."""
    single: list[str] = []
    grid: dict[str, list[Any]] = {}
    for word in words:
        key, value = parse_override(word)
        quoted = word.partition("=")[2].lstrip().startswith(("'", '"'))
        if isinstance(value, str) and "," in value and not quoted:
            _, values = parse_override(
                f"{key}=[{value}]"
            )  # as TOML: a list may be among them; else there are bare words
            grid[key] = (
                values
                if isinstance(values, list)
                else [parse_override(f"{key}={part}")[1] for part in value.split(",")]
            )
        else:
            single.append(word)
    return single, grid
