"""From a config to everything that it stands for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspd import models, topology
from fedspd.config import ExperimentConfig, method_class, method_options
from fedspd.core.algorithm import AnyAlgorithm
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError, FedspdError
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, Loss, cross_entropy, squared_error
from fedspd.data.federation import Federation
from fedspd.data.own import resolve
from fedspd.data.partitioning import federate
from fedspd.runtime.plan import Plan, Truth

ModelFactory = Callable[[tuple[int, ...], int], nn.Module]


@dataclass(frozen=True)
class Experiment:
    """A config and everything that it stands for."""

    config: ExperimentConfig
    federation: Federation
    topology: topology.Topology
    plan: Plan
    newcomers: Plan | None  # clients that join after training


def build_experiment(
    config: ExperimentConfig, data: Any = None, model: ModelFactory | None = None
) -> Experiment:
    """`data` and `model` stand in for data.name and model.name: objects of the user's own."""
    key = Key(config.seed)
    network = topology.build_topology(config.topology, config.clients, key)
    federation = _federation(config, data, key)
    if config.clusters > (fewest := int(np.diff(federation.train.start).min())):
        raise ConfigError(
            f"clusters = {config.clusters}: a client has only {fewest} examples; expected at most one cluster per example."
        )
    examples = federation.train.x, federation.train.y
    trainer = build_learner(config, federation.shape, federation.classes, examples, model)
    plan = Plan(
        build_algorithm(config),
        trainer,
        *_blocks(config, federation, network),
        federation.distributions,
        key,
    )
    last = config.clients + config.holdout_clients
    newcomers = plan.part(range(config.clients, last)) if config.holdout_clients else None
    return Experiment(config, federation, network, plan.part(range(config.clients)), newcomers)


def _blocks(
    config: ExperimentConfig, federation: Federation, network: topology.Topology
) -> tuple[Block, Block, Truth]:
    """Training and test examples of every client, newcomers included, and the truth of the former."""
    server, start = network.at(1).server, federation.train.start
    blocks = (federation.block(range(federation.clients), part) for part in ("train", "test"))
    train, test = (replace(block, network_size=config.clients, server=server) for block in blocks)
    return train, test, [federation.train.truth[low:high] for low, high in pairwise(start)]


def _federation(config: ExperimentConfig, data: Any, key: Key) -> Federation:
    source = resolve(config.data.name if data is None else data)
    second = resolve(config.data.second) if config.data.second is not None else None
    clients = config.clients + config.holdout_clients
    return federate(source, config.data, clients, key.of("data"), second)


def build_algorithm(config: ExperimentConfig) -> AnyAlgorithm:
    made: AnyAlgorithm = method_class(config)(clusters=config.clusters, **method_options(config))
    return made


def build_learner(
    config: ExperimentConfig,
    shape: tuple[int, ...],
    classes: int,
    examples: tuple[Tensor, Tensor] | None = None,
    model: ModelFactory | None = None,
) -> Learner:
    """What trains the config's model on examples of this shape; it is tried on two of `examples`, or on zeros without targets."""
    name = config.model.name_for(shape)
    factory = partial(models.build_model, config.model, shape, classes)
    if model is not None:
        name, factory = "the given model", partial(model, shape, classes)
    loss, device = _loss(config, classes), device_of(config)
    try:
        made = Learner(factory, config.training, loss, device, getattr(torch, config.dtype))
        x, y = (
            (torch.zeros(2, *shape), None)
            if examples is None
            else (examples[0][:2], examples[1][:2])
        )
        _check_output(made, x, y, classes, name)
    except FedspdError:
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"model.name = '{name}': it does not work on examples of shape {shape}, with {said}"
        ) from error
    return made


def _check_output(learner: Learner, x: Tensor, y: Tensor | None, classes: int, name: str) -> None:
    """Refuse a model whose output does not go with the targets, before anything is written."""
    found = tuple(learner.outputs(learner.flat, x).shape)
    expected: tuple[int, ...] = (
        (len(x), classes) if classes else found if y is None else tuple(y.shape)
    )
    if found != expected and not (classes and len(found) == 2 and found[1] > classes):
        meaning = "a column for each class" if classes else "the shape of the targets"
        raise ConfigError(
            f"model.name = '{name}': its output for {len(x)} examples has shape {found}; expected {expected}, {meaning}."
        )


def device_of(config: ExperimentConfig) -> torch.device:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=best if config.device == "auto" else config.device).device
    except (RuntimeError, AssertionError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device = '{config.device}': expected auto, cpu, or cuda where there is one."
        )
    return device


def _loss(config: ExperimentConfig, classes: int) -> Loss:
    fitting = "cross_entropy" if classes else "squared_error"
    if config.loss not in ("auto", fitting):
        kind = "data with classes" if classes else "a regression"
        raise ConfigError(f"loss = '{config.loss}': expected {fitting} for {kind}, or auto.")
    return cross_entropy if classes else squared_error
