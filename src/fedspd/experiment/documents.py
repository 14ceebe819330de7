"""Documents of a run folder: what the run trains, on which data and graph, with which versions."""

import platform
import sys
import time
from importlib.metadata import version

import torch

from fedspd import topology
from fedspd.config import as_dict, as_toml, clusters_of
from fedspd.core.keys import Key
from fedspd.experiment.build import Experiment, model_hash
from fedspd.storage.atomic import Json

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
        "hashes": hashes(experiment),
        "config": as_dict(experiment.config),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
    }


def hashes(experiment: Experiment) -> dict[str, str]:
    """Return the hashes of data and model, which do not follow from the config alone."""
    return {
        "data": experiment.federation.description["hash"],
        "model": model_hash(experiment.plan.learner),
    }
