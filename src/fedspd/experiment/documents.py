"""Documents of a run folder: what the run trains, on which data and graph, with which versions."""

import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version

import torch

from fedspd import topology
from fedspd.config import as_dict, as_toml, clusters_of, config_hash
from fedspd.core.errors import StorageError
from fedspd.core.keys import Key
from fedspd.experiment.build import Experiment, model_hash
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RESTORE, RunFolder

PACKAGES = ("fedspd", "torch", "numpy", "scipy")


def documents(experiment: Experiment) -> dict[str, Json | str]:
    """Return the documents of a new run besides run.json, by file name."""
    config, graph = experiment.config, experiment.topology.at(1)
    described = topology.describe(experiment.topology, Key(config.seed), clusters_of(config) or 1)
    return {
        "config.toml": as_toml(config),
        "partition.json": experiment.federation.description,
        "topology.json": {**described, "list": [] if graph.server else graph.edges().tolist()},
    }


def about(experiment: Experiment) -> Json:
    """Return the content of run.json."""
    learner = experiment.plan.learner
    packages = {name: version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **packages},
        "machine": {
            "system": platform.platform(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "device": str(learner.device),
        },
        "model": {
            "size": learner.size,
            "weights": learner.weights,
            "memory": "channels_last" if learner.channels_last else "contiguous",
        },
        "hashes": _hashes(experiment),
        "config": as_dict(experiment.config),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
    }


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
    check_same(run_folder, experiment, ("data", "model"))
    run_folder.lock()
    before = run_folder.read("run.json")
    rounds = [*before.get("continued_from", []), before["config"]["rounds"]]
    changes = {
        "hashes": _hashes(experiment),
        "config": as_dict(config),
        "continued_from": rounds,
    }
    run_folder.reopen()
    run_folder.write("run.json", {**before, **changes})
    run_folder.write("config.toml", as_toml(config))
    return run_folder


def check_same(
    run_folder: RunFolder,
    experiment: Experiment,
    names: Sequence[str] = ("data", "model", "config"),
) -> None:
    """Refuse to resume a run with another config, data or model than it was started with."""
    before, now = run_folder.read_complete("run.json").get("hashes", {}), _hashes(experiment)
    for name in names:
        if name not in before:
            path = run_folder.folder / "run.json"
            raise StorageError(f"'{path}' is damaged: it has no hash of the {name}. {RESTORE}")
        if before[name] != now[name]:
            raise StorageError(
                f"'{run_folder.folder}': the run was started with another {name} (hash "
                f"{before[name][:12]}, now {now[name][:12]}). Restore that {name}, or start a new "
                "run in another folder."
            )


def _hashes(experiment: Experiment) -> dict[str, str]:
    """Return what makes two runs the same: the hashes of their data, model and config."""
    return {
        "data": experiment.federation.description["hash"],
        "model": model_hash(experiment.plan.learner),
        "config": config_hash(experiment.config),  # last: it names data and model from Python
    }
