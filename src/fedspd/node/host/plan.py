"""The training plan of a node: the network's method and model on the node's own data."""

import numpy as np

from fedspd.core.block import Block
from fedspd.core.errors import ConfigError, DataError
from fedspd.core.keys import Key
from fedspd.data.custom import Reading, load_source
from fedspd.data.federation import Distribution, Partition, gather
from fedspd.data.sources import Examples, Source
from fedspd.experiment.build import (
    build_algorithm,
    build_experiment,
    build_learner,
    choose_metrics,
)
from fedspd.node.host.bundle import Bundle
from fedspd.node.identity.manifest import Manifest
from fedspd.runtime.plan import Plan


def build_plan(bundle: Bundle, data: str | None) -> Plan:
    """Return the node's plan on its own data, or on those that a simulation would assign to it."""
    plan = _build_simulated_plan(bundle) if data is None else _build_own_plan(bundle, data)
    _check_method(bundle.manifest, plan)
    return plan


def _build_simulated_plan(bundle: Bundle) -> Plan:
    if bundle.is_newcomer:
        raise DataError(
            f"'{bundle.identity.name}' has no data: a node that joins later brings its own; "
            "expected examples. Give them with --data."
        )
    manifest, experiment = bundle.manifest, build_experiment(bundle.config)
    federation = experiment.federation
    if (federation.shape, federation.classes) != (manifest.shape, manifest.classes):
        raise DataError(
            f"data.name = '{bundle.config.data.name}': does not fit this network's model; "
            f"expected examples of shape {manifest.shape} for {_describe(manifest.classes)}. "
            "Give the device's own with --data."
        )
    client = bundle.identity.client
    return experiment.plan.select_clients(range(client, client + 1))


def _build_own_plan(bundle: Bundle, data: str) -> Plan:
    config, manifest = bundle.config, bundle.manifest
    source = _load(data, config.privacy.is_on)
    _check_fits(manifest, source, data)
    algorithm, count = build_algorithm(config), len(source.train.y)
    if algorithm.NEEDS_EXAMPLES and count < algorithm.clusters:
        raise DataError(
            f"--data {data}: {count} training examples; "
            f"expected at least {algorithm.clusters}, one for each cluster. Give more examples."
        )
    train, test = (_build_block(examples, bundle) for examples in (source.train, source.test))
    learner = build_learner(config, manifest.shape, manifest.classes, (train.x[0], train.y[0]))
    true_clusters = [np.zeros(count, np.int64)]  # unknown: all examples count as one distribution
    about = 1, Key(config.seed), None, config.exchange
    metrics = choose_metrics(config, manifest.classes)
    return Plan(algorithm, learner, train, test, true_clusters, *about, metrics=metrics)


def _load(data: str, is_private: bool) -> Source:
    """Return the device's own data; every error names them."""
    try:
        return load_source(data, reading=Reading(is_numbered=True, splits_alone=is_private))
    except DataError as error:
        sentence = str(error).removeprefix(f"data.name = '{data}': ")
        raise DataError(f"--data {data}: {sentence}") from None


def _check_method(manifest: Manifest, plan: Plan) -> None:
    """Reject a method that sends other vectors than the network has agreed on."""
    algorithm, learner = plan.algorithm, plan.learner
    found = max(1, algorithm.offer_limit), algorithm.size_limit(learner)
    if found != (manifest.offer_limit, manifest.size_limit):
        raise ConfigError(
            f"{type(algorithm).__name__}: offers up to {found[0]} vectors of {found[1]} numbers; "
            f"expected {manifest.offer_limit} of {manifest.size_limit}, as when the network was "
            "created. Install the same method on all devices."
        )


def _check_fits(manifest: Manifest, source: Source, data: str) -> None:
    """Reject data that the network's model cannot take."""
    if source.shape != manifest.shape:
        raise DataError(
            f"--data {data}: has examples of shape {source.shape}; expected "
            f"{manifest.shape}, which this network's model takes. Give data of that shape."
        )
    if bool(source.classes) != bool(manifest.classes) or source.classes > manifest.classes:
        raise DataError(
            f"--data {data}: data of {_describe(source.classes)}; expected "
            f"{_describe(manifest.classes)}, as in this network's model. Give such data."
        )


def _describe(classes: int) -> str:
    return f"{classes} classes" if classes else "a regression"


def _build_block(examples: Examples, bundle: Bundle) -> Block:
    """Return the examples as the block of one client, scaled as the simulator scales them."""
    n, client = len(examples.y), bundle.identity.client
    partition = Partition(np.array([0, n]), np.arange(n), np.zeros(n, np.int64))
    part = gather([examples], [Distribution("own")], partition)
    return Block(
        [client],
        max(bundle.config.clients, client + 1),
        [part.x],
        [part.y],
        n,
        rounds=bundle.config.rounds,
        diameter=bundle.manifest.diameter,
    )
