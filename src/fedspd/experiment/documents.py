"""Documents of a run folder: what the run trains, on which data and graph, with which versions."""

import platform
import sys
import time
from importlib.metadata import version

import torch

from fedspd import topology
from fedspd.config import as_dict, as_toml, clusters_of, config_hash
from fedspd.core.errors import StorageError
from fedspd.core.keys import Key
from fedspd.experiment.build import Experiment, model_hash
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

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


def check_same(run_folder: RunFolder, experiment: Experiment) -> None:
    """Refuse to resume a run with another config, data or model than it was started with."""
    before, now = run_folder.read("run.json")["hashes"], _hashes(experiment)
    for name in now:
        if before[name] != now[name]:
            raise StorageError(
                f"'{run_folder.folder}': the run was started with another {name} (hash "
                f"{before[name][:12]}, now {now[name][:12]}). Restore that {name}, or start a new "
                "run in another folder."
            )


def _hashes(experiment: Experiment) -> dict[str, str]:
    return {
        "data": experiment.federation.description["hash"],
        "model": model_hash(experiment.plan.learner),
        "config": config_hash(experiment.config),  # last: it names data and model from Python
    }
