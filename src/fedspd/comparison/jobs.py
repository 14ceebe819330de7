"""List the runs of a comparison: methods x seeds x grid points."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedspd.algorithms import METHODS
from fedspd.config import (
    DEFAULT,
    METHOD_TABLES,
    ExperimentConfig,
    as_dict,
    check_used,
    given_dict,
    parse_override,
    set_key,
    validate,
    without_other_methods,
)
from fedspd.core.errors import ConfigError
from fedspd.core.imports import options_table
from fedspd.storage.atomic import Json

OPTIONS_TABLES = {*METHOD_TABLES, "options"}
RECOMMENDED = ("fedspd-split", "fedspd", "fedavg", "local")  # FedAvg plain and fine-tuned
FINETUNE, FINETUNE_EPOCHS = "fedavg.finetune", 10
ALL = "all"  # methods


@dataclass(frozen=True)
class Job:
    """One run of a comparison.

    name   of its run folder
    point  the values of the swept keys
    also   further points that it stands for: they differ in keys that the method does not use
    data, model   objects of the user's, in place of data.name and model.name
    """

    name: str
    config: ExperimentConfig
    point: Json
    also: list[Json] = field(default_factory=list)
    data: Any = field(default=None, repr=False, compare=False)
    model: Any = field(default=None, repr=False, compare=False)


def choose_methods(
    methods: str | None, base: ExperimentConfig, grid: dict[str, list[Any]] | None = None
) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the methods that a user names, and the grid with the fine-tuned FedAvg.

    None stands for the recommended methods and `all` for every method; the config's own method is
    always among these. FedAvg then runs twice, unless the grid varies its fine-tuning already.
    """
    grid = dict(grid or {})
    if methods is not None and methods.strip() != ALL:
        return [name.strip() for name in methods.split(",") if name.strip()], grid
    chosen = RECOMMENDED if methods is None else tuple(METHODS)
    own = () if base.method in chosen else (base.method,)
    if FINETUNE not in grid:
        grid[FINETUNE] = [0, as_dict(base)["fedavg"]["finetune"] or FINETUNE_EPOCHS]
    return [*own, *chosen], grid


def choose_jobs(
    base: ExperimentConfig,
    methods: str | None,
    seeds: int,
    grid: dict[str, list[Any]] | None = None,
) -> list[Job]:
    """Return the jobs of a comparison; refuse a config with options that none of them uses."""
    chosen, points = choose_methods(methods, base, grid)
    check_used(base, chosen)
    return list_jobs(base, chosen, seeds, points)


def list_jobs(
    base: ExperimentConfig,
    methods: Sequence[str],
    seeds: int,
    grid: dict[str, list[Any]] | None = None,
) -> list[Job]:
    """Return a job for every method with every seed at every point of the grid.

    With the same seed, all methods have the same partition of the data and the same graph. An
    option of one method is swept for this method alone. A method runs once for all points that
    differ only in keys that it does not use.
    """
    grid = grid or {}
    _check_methods(methods, seeds)
    _check_grid(grid, methods)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    jobs: dict[str, Job] = {}
    for point, seed, method in itertools.product(points, range(seeds), methods):
        point = _own_point(point, method)
        job = _job(base, method, base.seed + seed, point)
        first = jobs.setdefault(_used(job, grid), job)
        if point not in (first.point, *first.also):
            first.also.append(point)
    names = Counter(job.name for job in jobs.values())
    for name, count in names.items():
        if count > 1:
            raise ConfigError(
                f"'{name}': the folder of two runs; expected one run each. Rename a value."
            )
    return list(jobs.values())


def _used(job: Job, grid: Json) -> str:
    """Return a text that is equal for jobs of the same run."""
    tree = as_dict(job.config)
    method = METHODS.get(job.config.method)
    unused = method.UNUSED_KEYS if method else ()
    for key in grid:
        if key in unused or key.partition(".")[0] in unused:
            set_key(tree, key, DEFAULT)
    return json.dumps(tree, sort_keys=True)


def _own_point(point: Json, method: str) -> Json:
    """Return the point without the options of other methods."""
    others = OPTIONS_TABLES - {options_table(method)}
    return {key: value for key, value in point.items() if key.partition(".")[0] not in others}


def _check_methods(methods: Sequence[str], seeds: int) -> None:
    if seeds < 1:
        raise ConfigError(f"seeds = {seeds}: too few; expected at least 1.")
    if not methods:
        raise ConfigError("methods = []: too few; expected at least one method.")
    if len(set(methods)) < len(methods):
        raise ConfigError(
            f"methods = {', '.join(methods)}: a method is repeated; expected each once."
        )


def _check_grid(grid: dict[str, list[Any]], methods: Sequence[str]) -> None:
    tables = [options_table(method) for method in methods]
    for key, values in grid.items():
        given = f"{key} = {', '.join(map(str, values))}"
        table = key.partition(".")[0]
        if table in OPTIONS_TABLES and table not in tables:
            owner = "a method given as module:Class" if table == "options" else table
            raise ConfigError(
                f"{given}: no method has this option; expected {owner} among the methods."
            )
        if key in ("method", "seed"):
            raise ConfigError(f"{given}: not a key to sweep; expected it as {key}s.")
        if len({repr(value) for value in values}) < len(values):
            raise ConfigError(f"{given}: a value is repeated; expected each once.")


def _job(base: ExperimentConfig, method: str, seed: int, point: Json) -> Job:
    tree = without_other_methods(given_dict(base), method)
    for key, value in point.items():
        set_key(tree, key, value)
    config = validate({**tree, "method": method, "seed": seed})
    words = [*(f"{key}={value}" for key, value in point.items()), method.replace(":", ".")]
    name = ",".join([*words, f"seed={seed}"]).replace("/", "_")
    return Job(name, config, point)


def parse_grid(words: Sequence[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Split KEY=VALUE words into those with one value and a grid of those with several."""
    single: list[str] = []
    grid: dict[str, list[Any]] = {}
    for word in words:
        key, value = parse_override(word)
        is_quoted = word.partition("=")[2].lstrip().startswith(("'", '"'))
        if isinstance(value, str) and "," in value and not is_quoted:
            if key in grid:
                raise ConfigError(
                    f"{key} = {value}: swept twice; expected all values in one list, such as "
                    f"{key}={','.join(map(str, grid[key]))},{value}."
                )
            grid[key] = _parse_values(key, value)
        else:
            single.append(word)
    return single, grid


def _parse_values(key: str, text: str) -> list[Any]:
    """Parse values separated by commas: as TOML, where each may be a list, else one by one."""
    _, values = parse_override(f"{key}=[{text}]")
    if isinstance(values, list):
        return values
    return [parse_override(f"{key}={value}")[1] for value in text.split(",")]
