"""Estimate the hours of an experiment: gradient steps times the measured seconds of one step.

As in `fedspd run --dry-run` the steps are counted and a step is timed. But a list of all
experiments must not build every dataset, so the steps are those of the config alone. Passes without
a gradient count too: the losses of every round, and the evaluations.
"""

import json
import math
import time
from collections.abc import Iterable
from functools import cache

import torch

from fedspd.config import ExperimentConfig, as_dict, clusters_of, validate
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.data.custom import load_source
from fedspd.data.sources import dataset_spec, is_official
from fedspd.experiment.build import build_learner
from fedspd.paper.records import key_of, settings_of, unused_keys

DEFAULT_EXAMPLES = 300  # per client, at most
FORWARD_SHARE = 0.3  # of a gradient step's time that a pass without a gradient takes
QUICK_SECONDS = 0.2  # a step below that is timed once more, when all is warm
FINAL_EPOCHS = {"fedspd": "final_epochs", "fedspd-split": "final_epochs", "fedavg": "finetune"}


def distinct_runs(configs: Iterable[ExperimentConfig]) -> list[ExperimentConfig]:
    """Return each run once: experiments share some."""
    return list({key_of(settings_of(config)): config for config in configs}.values())


def hours_of(configs: list[ExperimentConfig], workers: int) -> float:
    """Return the hours of all runs on so many workers."""
    seconds = sum(run_seconds(config) for config in distinct_runs(configs))
    return seconds / workers / 3600


def run_seconds(config: ExperimentConfig) -> float:
    """Return the seconds of a run on one core, if all examples count in every local update."""
    steps = count_steps(config) + FORWARD_SHARE * count_passes(config)
    return steps * step_seconds(config)


def count_steps(config: ExperimentConfig) -> int:
    """Return the gradient steps of a run, if all examples count in every local update."""
    training, method = config.training, config.method
    batches = _batches(config, config.data.examples)
    epochs = training.epochs * (config.rounds - 1 + training.first_round_factor)
    models = clusters_of(config) if method == "fedem" else 1
    final = getattr(getattr(config, method), FINAL_EPOCHS[method]) if method in FINAL_EPOCHS else 0
    return int(config.clients * batches * (epochs * models + final))


def count_passes(config: ExperimentConfig) -> int:
    """Return the batches that a model only predicts: losses of every round, and evaluations."""
    models = 1 if "clusters" in unused_keys(config) else max(1, clusters_of(config))
    trained = _batches(config, config.data.examples)
    evaluated = trained + _batches(config, config.data.test_examples)
    evaluations = 1 + math.ceil(config.rounds / config.evaluate_every)
    return config.clients * (config.rounds * models * trained + evaluations * evaluated)


def _batches(config: ExperimentConfig, examples: int | None) -> int:
    return math.ceil((examples or DEFAULT_EXAMPLES) / config.training.batch)


def step_seconds(config: ExperimentConfig) -> float:
    """Return the seconds of one gradient step of the config's model on a core of this machine.

    That is processor time: what else the machine does at the moment does not count.
    """
    tree = as_dict(config)
    timed = {"model": tree["model"], "precision": config.precision}
    timed["training"] = {"batch": config.training.batch, "momentum": config.training.momentum}
    return _timed_step(config.data.name, json.dumps(timed, sort_keys=True))


@cache
def _timed_step(data: str, settings: str) -> float:
    source = dataset_spec(data) if is_official(data) else load_source(data)
    config = validate(json.loads(settings))
    learner = build_learner(config, source.shape, source.classes)
    x = torch.rand(config.training.batch, *source.shape)
    y = torch.zeros(len(x), dtype=torch.long) if source.classes else torch.zeros(len(x))
    data_block = Block([0], 1, [x], [y], len(x))
    seconds = math.inf
    for _ in range(3):
        start = time.process_time()
        learner.train(learner.flat[None], data_block, Key(0), rates=[0.0])
        seconds = min(seconds, time.process_time() - start)
        if seconds > QUICK_SECONDS:
            break
    return seconds
