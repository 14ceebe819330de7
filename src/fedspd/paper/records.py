"""Records of runs: a small JSON object each, from which tables and figures are made.

OUT/
  runs/NAME/                        run folders, as `fedspd run` makes them; may be deleted
  results/EXPERIMENT.SCALE.json     the records of the runs; enough for all that follows
  reports/EXPERIMENT.SCALE/         tables and figures

A record has the settings that its experiment gave. They are validated when it is read, and compared
by the values that are not defaults: so an experiment does not repeat a run that another one has
made, nor after a version that adds a key or changes a default. Neither the device counts nor scores
beside accuracy (`metrics`): the run is the same, though a record may lack some of them.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fedspd.algorithms import METHODS
from fedspd.config import (
    ExperimentConfig,
    as_dict,
    set_key,
    validate,
    without_other_methods,
)
from fedspd.core.errors import ConfigError
from fedspd.core.metrics import TRAINING_ACCURACY
from fedspd.reporting.statistics import mean
from fedspd.storage.atomic import Json, disk_errors, flatten, read_json, write_atomically
from fedspd.storage.run_folder import RunFolder

CURVE_POINTS = 50  # at most, in a record
WITHOUT_EFFECT = ("metrics", "device")  # keys of what is measured, and where


def settings_of(config: ExperimentConfig) -> Json:
    """Return the method, the seed and all values that are not defaults and change the run."""
    defaults, unused = _defaults(), (*WITHOUT_EFFECT, *unused_keys(config))
    values = flatten(without_other_methods(as_dict(config), config.method))
    changed = {
        key: value
        for key, value in values.items()
        if value != defaults.get(key) and key.partition(".")[0] not in unused
    }
    return {"method": config.method, "seed": config.seed, **changed}


def unused_keys(config: ExperimentConfig) -> tuple[str, ...]:
    """Return the keys and tables that the config's method does not use."""
    method = METHODS.get(config.method)
    return method.UNUSED_KEYS if method else ()


def given_settings(config: ExperimentConfig) -> Json:
    """Return the values that the config was made with, also if they are defaults, by dotted key."""
    tree = config.model_dump(exclude_unset=True, exclude_none=True, by_alias=True)
    return flatten(without_other_methods(tree, config.method))


def config_of(settings: Json) -> ExperimentConfig:
    """Return the config with these values, by dotted key."""
    tree: Json = {}
    for key, value in settings.items():
        set_key(tree, key, value)
    return validate(tree)


@cache
def _defaults() -> Json:
    return flatten(as_dict(validate({})))


def key_of(settings: Json) -> str:
    """Return the same short text for equal settings."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Records:
    """The records in one folder, by the settings of their runs."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.by_key: dict[str, Json] = {}
        for path in sorted((out / "results").glob("*.json")):
            for record in read_json(path).get("runs", []):
                with suppress(ConfigError):  # of another version: it has to run again
                    self.add(config_of(record["settings"]), record)

    def add(self, config: ExperimentConfig, record: Json) -> None:
        """Keep the record of a run with this config."""
        self.by_key[key_of(settings_of(config))] = record

    def of(self, config: ExperimentConfig) -> Json | None:
        """Return the record of the run with this config; None: it has not run."""
        return self.by_key.get(key_of(settings_of(config)))

    def harvest(self, names: Iterable[str], configs: Iterable[ExperimentConfig]) -> None:
        """Make the records of those runs that are finished in OUT/runs."""
        for name, config in zip(names, configs, strict=True):
            folder = self.out / "runs" / name
            if self.of(config) is None and (folder / "result.json").exists():
                self.add(config, {"settings": given_settings(config), **read_record(folder)})

    def write(self, name: str, configs: Sequence[ExperimentConfig]) -> None:
        """Write the records of these runs, as far as they exist, into results/NAME.json."""
        found = {key_of(settings_of(c)): self.of(c) for c in configs}
        runs = [record for record in found.values() if record is not None]
        if not runs:
            return
        path = self.out / "results" / f"{name}.json"
        with disk_errors(self.out):
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = ",\n".join(json.dumps(run) for run in runs)
            write_atomically(path, f'{{"runs": [\n{lines}\n]}}\n')


def read_record(folder: Path) -> Json:
    """Return what tables and figures need of a finished run."""
    run_folder = RunFolder.open(folder)
    result, about = run_folder.read("result.json"), run_folder.read("run.json")
    return {
        "accuracy": _short(result["accuracy"]["mean"]),
        "before": _short(result["accuracy_before_final_phase"]["mean"]),
        "clients": [_short(score) for score in result["clients"]["accuracy"]],
        "purity": _short(result["purity"]),
        "models": result["models_sent"],
        "multicast": result["bytes"]["multicast"],
        "point_to_point": result["bytes"]["point_to_point"],
        "steps": result["steps"],
        "seconds": result["seconds"],
        "curve": _curve(run_folder),
        "hash": result["hash"],
        "machine": about["machine"],
        "date": about["started"][:10],
    }


def _curve(run_folder: RunFolder) -> Json:
    """Return the mean scores of the evaluated rounds, thinned out."""
    events = [e for e in run_folder.events() if e["event"] == "round" and "accuracy" in e]
    every = -(-len(events) // CURVE_POINTS)
    kept = events[every - 1 :: every]
    curve: Json = {"round": [event["round"] for event in kept]}
    for field in ("accuracy", "loss", TRAINING_ACCURACY):
        if kept and field in kept[-1]:
            curve[field] = [_short(mean(event[field])) for event in kept]
    return curve


def _short(number: Any) -> float | None:
    """Return the number with five digits: more would say nothing, and records are kept in git."""
    return None if number is None else float(f"{number:.5g}")
