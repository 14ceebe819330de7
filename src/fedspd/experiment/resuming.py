"""What a run that goes on must have in common with its beginning.

Configs are compared by their values as this version reads them, not by a recorded hash, which every
new key would change.
"""

from pathlib import Path
from typing import Any

from fedspd.config import ExperimentConfig, as_dict, as_toml, changes, load, validate
from fedspd.config.messages import as_json
from fedspd.core.errors import StorageError
from fedspd.core.imports import FROM_PYTHON
from fedspd.experiment.build import Experiment
from fedspd.experiment.documents import hashes
from fedspd.storage.run_folder import RESTORE, RunFolder

MORE = {"rounds", "patience"}  # the keys of which a run may be given more


def resumed_config(folder: Path, given: ExperimentConfig | None) -> ExperimentConfig:
    """Return the config in the folder, or the given one if it only extends the run."""
    RunFolder.open(folder)
    stored = load(folder / "config.toml")
    if given is None:
        return stored
    wanted = _named_as(given, stored)
    changed = changes(stored, wanted)
    if not changed:
        return stored
    if wanted.rounds > stored.rounds and changed.keys() <= MORE:
        return stored.model_copy(update={"rounds": wanted.rounds, "patience": wanted.patience})
    raise StorageError(
        f"'{folder}': the run was started with another config: {first_change(changed)}. Resume it "
        "without a config, with more rounds alone, or start a new run in another folder."
    )


def _named_as(given: ExperimentConfig, stored: ExperimentConfig) -> ExperimentConfig:
    """Return the config with the stored names of data and model that were passed as objects.

    Without a number of clients, it has that of the data too.
    """
    tables: dict[str, Any] = {}
    if "clients" not in given.model_fields_set:
        tables["clients"] = stored.clients
    if stored.data.name.startswith(FROM_PYTHON):
        tables["data"] = given.data.model_copy(update={"name": stored.data.name})
    if (stored.model.name or "").startswith(FROM_PYTHON):
        tables["model"] = given.model.model_copy(update={"name": stored.model.name})
    return given.model_copy(update=tables)


def first_change(changed: dict[str, tuple[Any, Any]], run: str = "") -> str:
    """Return the first of the changed keys with both values, for a sentence."""
    key, values = next(iter(changed.items()))
    before, now = ("not set" if value is None else as_json(value) for value in values)
    return f"{key} = {before}{f' in {run!r}' if run else ''}, now {now}".replace('"', "'")


def extend(run_folder: RunFolder, experiment: Experiment) -> RunFolder:
    """Lock a run and give it more rounds; a finished one goes back to before its final phase.

    run.json comes before config.toml: after a crash in between, the same command goes on.
    """
    config = experiment.config
    if config.training.schedule == "cosine":
        raise StorageError(
            f"'{run_folder.folder}': training.schedule = 'cosine' follows the number of rounds, so "
            "the rounds that are done would have had other learning rates. Start a new run."
        )
    if config.privacy.is_on:
        raise StorageError(
            f"'{run_folder.folder}': the noise of a private run follows from its rounds, so more "
            "would cost more than its epsilon. Start a new run."
        )
    _check_hashes(run_folder, experiment)
    run_folder.lock()
    before = run_folder.read("run.json")
    rounds = [*before.get("continued_from", []), before["config"]["rounds"]]
    run_folder.reopen()
    news = {"config": as_dict(config), "continued_from": rounds}
    run_folder.write("run.json", {**before, **news})
    run_folder.write("config.toml", as_toml(config))
    return run_folder


def check_same(run_folder: RunFolder, experiment: Experiment) -> None:
    """Refuse to resume a run with another config, data or model than it was started with."""
    _check_hashes(run_folder, experiment)
    before = validate(run_folder.read_complete("run.json")["config"])
    if changed := changes(before, experiment.config):
        raise StorageError(
            f"'{run_folder.folder}': the run was started with another config: "
            f"{first_change(changed)}. Restore config.toml, or start a new run in another folder."
        )


def _check_hashes(run_folder: RunFolder, experiment: Experiment) -> None:
    before = run_folder.read_complete("run.json").get("hashes", {})
    for name, now in hashes(experiment).items():
        if name not in before:
            path = run_folder.folder / "run.json"
            raise StorageError(f"'{path}' is damaged: it has no hash of the {name}. {RESTORE}")
        if before[name] != now:
            raise StorageError(
                f"'{run_folder.folder}': the run was started with another {name} (hash "
                f"{before[name][:12]}, now {now[:12]}). Restore that {name}, or start a new "
                "run in another folder."
            )
