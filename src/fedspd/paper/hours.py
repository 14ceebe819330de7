"""Estimate the hours of an experiment: gradient steps times the measured seconds of one step.

As in `fedspd run --dry-run` the steps are counted and a step is timed. But a list of all
experiments must not build every dataset, so the steps are those of the config alone. Passes without
a gradient count too: the losses of every round, and the evaluations. FedSPD trains on the examples
of one cluster, chosen by its share u of 0.1 to 0.9: on average u^2 + (1 - u)^2 of them, 0.6.
"""

import json
import math
import time
from collections.abc import Iterable
from functools import cache

import torch

from fedspd.algorithms import METHODS
from fedspd.config import ExperimentConfig, as_dict, clusters_of, validate
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.data.custom import load_source
from fedspd.data.sources import dataset_spec, is_official
from fedspd.experiment.build import build_algorithm, build_learner
from fedspd.experiment.sharing import rounds_key
from fedspd.paper.records import key_of, settings_of, unused_keys
from fedspd.privacy.budget import Schedule

DEFAULT_EXAMPLES = 300  # per client, at most
ONE_CLUSTER = 0.6  # of a client's examples: those that FedSPD trains on in a round, on average
FORWARD_SHARE = 0.3  # of a gradient step's time that a pass without a gradient takes
TIMED_STEPS, TIMED_CLASSES = 3, 10


def hours_of(configs: Iterable[ExperimentConfig], workers: int) -> float:
    """Return the hours of all runs on so many workers."""
    return sum(seconds_by_run(configs).values()) / workers / 3600


def seconds_by_run(configs: Iterable[ExperimentConfig]) -> dict[str, float]:
    """Return the seconds of each run on one core, by the key of its settings.

    Experiments have some runs in common. Of runs that share their rounds, the first trains them.
    """
    seconds: dict[str, float] = {}
    trained: set[str] = set()
    for config in configs:
        key = key_of(settings_of(config))
        if key not in seconds:
            rounds = rounds_key(config) or key
            seconds[key] = run_seconds(config, has_rounds=rounds not in trained)
            trained.add(rounds)
    return seconds


def run_seconds(config: ExperimentConfig, has_rounds: bool = True) -> float:
    """Return the seconds of a run, or of its final phase alone, if all examples count."""
    steps, passes = _final_steps(config), _evaluated_batches(config)
    if has_rounds:
        steps, passes = steps + _round_steps(config), passes + _round_passes(config)
    return config.clients * (steps + FORWARD_SHARE * passes) * step_seconds(config)


def _round_steps(config: ExperimentConfig) -> int:
    """Return a client's gradient steps in all rounds."""
    training, rounds = config.training.over(config.rounds), config.rounds
    schedule = Schedule.of(build_algorithm(config), training, rounds, config.data.examples)
    epochs = sum(sum(planned.epochs_of_an_example) for planned in schedule.rounds)
    share = ONE_CLUSTER if config.method == "fedspd" and clusters_of(config) > 1 else 1.0
    examples = math.ceil(share * (config.data.examples or DEFAULT_EXAMPLES))
    return _batches(config, examples) * epochs


def _final_steps(config: ExperimentConfig) -> int:
    method = METHODS.get(config.method)
    options = method.FINAL_OPTIONS if method else ()
    epochs = int(as_dict(config)[config.method][options[0]]) if options else 0
    return _batches(config, config.data.examples) * epochs


def _round_passes(config: ExperimentConfig) -> int:
    """Return the batches that a client's models only predict: losses, and evaluations."""
    models = 1 if "clusters" in unused_keys(config) else max(1, clusters_of(config))
    losses = config.rounds * models * _batches(config, config.data.examples)
    return losses + math.ceil(config.rounds / config.evaluate_every) * _evaluated_batches(config)


def _evaluated_batches(config: ExperimentConfig) -> int:
    data = config.data
    return _batches(config, data.examples) + _batches(config, data.test_examples)


def _batches(config: ExperimentConfig, examples: int | None) -> int:
    return math.ceil((examples or DEFAULT_EXAMPLES) / config.training.batch)


def step_seconds(config: ExperimentConfig) -> float:
    """Return the seconds of one gradient step of the config's model on a core of this machine.

    That is processor time: what else the machine does at the moment does not count.
    """
    tree = as_dict(config)
    timed = {"model": tree["model"], "precision": config.precision}
    timed["training"] = {"batch": config.training.batch, "momentum": config.training.momentum}
    name = config.data.name
    source = dataset_spec(name) if is_official(name) else load_source(name)
    return _timed_step(source.shape, bool(source.classes), json.dumps(timed, sort_keys=True))


@cache
def _timed_step(shape: tuple[int, ...], classifies: bool, settings: str) -> float:
    """Return the least time of some steps: the first two take up to three times as long.

    The number of classes only changes the last layer; so datasets with equal shapes share this.
    """
    config = validate(json.loads(settings))
    learner = build_learner(config, shape, TIMED_CLASSES if classifies else 0)
    x = torch.rand(config.training.batch, *shape)
    y = torch.zeros(len(x), dtype=torch.long) if classifies else torch.zeros(len(x))
    data_block = Block([0], 1, [x], [y], len(x))
    seconds = math.inf
    for _ in range(TIMED_STEPS):
        start = time.process_time()
        learner.train(learner.flat[None], data_block, Key(0), rates=[0.0])
        seconds = min(seconds, time.process_time() - start)
    return seconds
