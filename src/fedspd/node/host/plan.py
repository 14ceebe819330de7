"""What a node trains: the network's method and model, on examples of its own."""

import numpy as np

from fedspd.config import ExperimentConfig, validate
from fedspd.core.block import Block
from fedspd.core.errors import DataError
from fedspd.core.keys import Key
from fedspd.data.custom import load_source
from fedspd.data.federation import Distribution, Partition, gather
from fedspd.data.sources import Examples, Source
from fedspd.experiment.build import build_algorithm, build_experiment, build_learner
from fedspd.node.identity.manifest import Manifest
from fedspd.runtime.plan import Plan


def plan(manifest: Manifest, client: int, data: str | None) -> Plan:
    """`data` is the device's own; without it, the examples that a simulation of the config would deal to this client."""
    config = validate(manifest.config)
    if data is not None:
        return _own(manifest, config, client, load_source(data))
    if client >= config.clients:
        raise DataError(
            "A node that joins a running network brings its own examples: give them with --data."
        )
    experiment = build_experiment(config)
    if (experiment.federation.shape, experiment.federation.classes) != (
        manifest.shape,
        manifest.classes,
    ):
        raise DataError(
            f"This network's model takes examples of shape {manifest.shape} for {_kind(manifest.classes)}, and data.name = "
            f"'{config.data.name}' has others: give this device's own with --data."
        )
    return experiment.plan.select_clients(range(client, client + 1))


def _own(manifest: Manifest, config: ExperimentConfig, client: int, source: Source) -> Plan:
    _check_fits(manifest, source)
    if (count := len(source.train.y)) < config.clusters:
        raise DataError(
            f"'{source.name}' has {count} examples to train on: expected at least {config.clusters}, one for each cluster."
        )
    train, test = (
        _block(examples, client, max(config.clients, client + 1))
        for examples in (source.train, source.test)
    )
    trainer = build_learner(config, manifest.shape, manifest.classes, (train.x[0], train.y[0]))
    return Plan(
        build_algorithm(config),
        trainer,
        train,
        test,
        [np.zeros(count, np.int64)],
        1,
        Key(config.seed),
    )


def _check_fits(manifest: Manifest, source: Source) -> None:
    if source.shape != manifest.shape:
        raise DataError(
            f"'{source.name}' has examples of shape {source.shape}: expected {manifest.shape}, as this network's model takes them."
        )
    if bool(source.classes) != bool(manifest.classes) or source.classes > manifest.classes:
        raise DataError(
            f"'{source.name}' is data of {_kind(source.classes)}: this network's model is for {_kind(manifest.classes)}."
        )


def _kind(classes: int) -> str:
    return f"{classes} classes" if classes else "a regression"


def _block(examples: Examples, client: int, network: int) -> Block:
    """Scaled as the simulator scales them."""
    n = len(examples.y)
    part = gather(
        [examples],
        [Distribution("own")],
        Partition(np.array([0, n]), np.arange(n), np.zeros(n, np.int64)),
    )
    return Block([client], network, [part.x], [part.y], n)
