"""Build an experiment from its config: data, graph, model, method and plan."""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedspd import models, topology
from fedspd.config import (
    ExperimentConfig,
    clusters_of,
    method_class,
    method_options,
)
from fedspd.core.algorithm import AnyAlgorithm
from fedspd.core.augmentation import Augmentation
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError, FedspdError
from fedspd.core.imports import FROM_PYTHON
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.core.losses import Loss, cross_entropy, squared_error
from fedspd.core.metrics import CLASS_METRICS, REGRESSION_METRICS, TRAINING_ACCURACY
from fedspd.core.precision import has_bfloat16
from fedspd.data import sources
from fedspd.data.custom import Reading, load_source
from fedspd.data.federation import ClientExamples, Federation
from fedspd.data.labels import Task
from fedspd.data.partitioning import federate
from fedspd.experiment.validation import split_validation
from fedspd.privacy.budget import Budget, Schedule, plan_budget
from fedspd.privacy.checks import check_model, describe_export
from fedspd.privacy.randomness import NoiseSource
from fedspd.runtime.plan import GroundTruth, Plan

ModelFactory = Callable[[tuple[int, ...], int], nn.Module]


@dataclass(frozen=True)
class Experiment:
    """A config and everything that was built from it."""

    config: ExperimentConfig
    federation: Federation
    topology: topology.Topology
    plan: Plan
    newcomers: Plan | None  # clients that join after training


def build_experiment(
    config: ExperimentConfig, data: Any = None, model: ModelFactory | None = None
) -> Experiment:
    """Return the experiment; the user's `data` and `model` replace data.name and model.name."""
    key = Key(config.seed)
    source = load_source(config.data.name if data is None else data, reading=reading_of(config))
    config = _with_own_clients(config, source)
    federation = _build_federation(config, source, key)  # first: it refuses too many clients
    network = topology.build_topology(config.topology, config.clients, key)
    algorithm = build_algorithm(config)
    algorithm.check_network(network.at(1).clients, network.at(1).server)
    examples = federation.train.x, federation.train.y
    learner = build_learner(config, federation.shape, federation.classes, examples, model)
    blocks = _build_blocks(config, federation, network)
    truth, test_truth = map(_truth_by_client, (federation.train, federation.test))
    (train, test), validation = blocks, None
    if config.data.validation:
        share = config.data.validation
        train, validation, truth = split_validation(train, truth, share, key.of("data"))
    _check_clusters(algorithm, train)
    about = federation.distributions, key, test_truth, config.exchange
    metrics = choose_metrics(config, federation.classes)
    budget = build_budget(config)
    limit = None if budget is None else budget.limit
    plan = Plan(algorithm, learner, train, test, truth, *about, validation, metrics, limit)
    clients = range(config.clients)
    held_out = range(config.clients, config.clients + config.holdout_clients)
    newcomers = plan.select_clients(held_out) if held_out else None
    config = _name_given(config, federation if data is not None else None, model and learner)
    return Experiment(config, federation, network, plan.select_clients(clients), newcomers)


def _name_given(
    config: ExperimentConfig, federation: Federation | None, learner: Learner | None
) -> ExperimentConfig:
    """Let the config name the data and the model that were passed as objects.

    Nobody can take such a config for one of the dataset or the model that it named before.
    """
    tables: dict[str, Any] = {}
    if federation is not None:
        source = federation.description["sources"][0]
        shape = " x ".join(map(str, federation.shape))
        name = f"{FROM_PYTHON}{source['name']}, shape {shape}, sha256 {source['sha256'][:16]}"
        tables["data"] = config.data.model_copy(update={"name": name})
    if learner is not None:
        kind, digest = type(learner.module).__name__, model_hash(learner)[:16]
        name = f"{FROM_PYTHON}{kind}, {learner.size} parameters, sha256 {digest}"
        tables["model"] = config.model.model_copy(update={"name": name})
    return config.model_copy(update=tables)


def model_hash(learner: Learner) -> str:
    """Return a hash of the names and shapes of a model's parameters."""
    tensors = learner.module.state_dict()
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()


def reading_of(config: ExperimentConfig) -> Reading:
    """Return how the config says to read custom data."""
    data = config.data
    tasks: dict[str, Task] = {"cross_entropy": "classes", "squared_error": "regression"}
    task = tasks.get(config.loss, "auto")
    return Reading(tuple(data.inputs or ()), data.target, data.client, task)


def _with_own_clients(config: ExperimentConfig, source: sources.Source) -> ExperimentConfig:
    """Let the config have the clients that the data came with, unless it says how many."""
    is_given = source.owners is not None and config.data.mixture in (None, "given")
    if not is_given or "clients" in config.model_fields_set or source.owners is None:
        return config
    clients = len(source.owners.names) - config.holdout_clients
    if clients < 1:
        raise ConfigError(
            f"holdout_clients = {config.holdout_clients}: '{source.name}' has "
            f"{len(source.owners.names)} clients; expected fewer."
        )
    return config.model_copy(update={"clients": clients})


def _build_federation(config: ExperimentConfig, source: sources.Source, key: Key) -> Federation:
    name = config.data.second
    second = None if name is None else load_source(name, key="data.second")
    clients = config.clients + config.holdout_clients
    return federate(source, config.data, clients, key.of("data"), second, config.holdout_clients)


def _check_clusters(algorithm: AnyAlgorithm, train: Block) -> None:
    fewest = int(train.counts_C.min())
    if algorithm.NEEDS_EXAMPLES and algorithm.clusters > fewest:
        raise ConfigError(
            f"clusters = {algorithm.clusters}: a client has only {fewest} examples; expected at "
            "most one cluster per example."
        )


def _build_blocks(
    config: ExperimentConfig, federation: Federation, network: topology.Topology
) -> tuple[Block, Block]:
    """Return the training and test examples of all clients."""
    graph = network.at(1)
    diameter = topology.diameter_bound(network)
    blocks = (federation.block(range(federation.clients), part) for part in ("train", "test"))
    train, test = (
        replace(
            block,
            network_size=config.clients,
            server=graph.server,
            rounds=config.rounds,
            diameter=diameter,
        )
        for block in blocks
    )
    return train, test


def _truth_by_client(examples: ClientExamples) -> GroundTruth:
    return [examples.truth[low:high] for low, high in pairwise(examples.start)]


def choose_metrics(config: ExperimentConfig, classes: int) -> tuple[str, ...]:
    """Return the names of the scores beside accuracy; refuse those of the other kind of task.

    A regression always has both of its scores: they stand where classes have the accuracy.
    """
    fitting = [*CLASS_METRICS, TRAINING_ACCURACY] if classes else [*REGRESSION_METRICS]
    for name in config.metrics or ():
        if name not in fitting:
            kind = "data with classes" if classes else "a regression"
            names = f"{', '.join(fitting[:-1])} or {fitting[-1]}"
            raise ConfigError(f"metrics = '{name}': not a score of {kind}; expected {names}.")
    return tuple(dict.fromkeys(config.metrics or ()) if classes else fitting)


def build_algorithm(config: ExperimentConfig) -> AnyAlgorithm:
    """Return the config's method with its options."""
    method, options = method_class(config), method_options(config)
    made: AnyAlgorithm = method(clusters=clusters_of(config), **options)
    return made


def build_budget(config: ExperimentConfig) -> Budget | None:
    """Return the privacy that the config asks for; it follows from nothing but the config."""
    if not config.privacy.is_on:
        return None
    algorithm, examples = build_algorithm(config), config.data.examples
    training = config.training.over(config.rounds)
    schedule = Schedule.of(algorithm, training, config.rounds, examples)
    return plan_budget(config.privacy, schedule)


def privacy_note(config: ExperimentConfig, is_silent: bool = False) -> str | None:
    """Return whether the budget covers an exported personal model; None without privacy.

    is_silent   whether the client's budget is spent
    """
    if not config.privacy.is_on:
        return None
    return describe_export(
        method_class(config),
        method_options(config),
        config.privacy,
        is_scaled=config.data.scale != "none",
        is_silent=is_silent,
    )


# ---- the learner


def build_learner(
    config: ExperimentConfig,
    shape: tuple[int, ...],
    classes: int,
    examples: tuple[Tensor, Tensor] | None = None,
    model: ModelFactory | None = None,
) -> Learner:
    """Return the learner of the config's model, or of `model`, for examples of this shape.

    The model is tried on two of `examples`, or on zeros, so that one that does not fit is refused.
    """
    name = f"model.name = '{config.model.name_for(shape)}'"
    factory = partial(models.build_model, config.model, shape, classes)
    if model is not None:
        name, factory = "model", _factory_of(model, shape, classes)
    x, y = torch.zeros(2, *shape), None
    if examples is not None:
        x, y = examples[0][:2], examples[1][:2]
    budget = build_budget(config)
    loss, device, dtype = _choose_loss(config, classes), device_of(config), config.dtype
    precision, head = config.precision, config.model.head
    if precision != "float32":
        _check_processor(config, device)
    mechanism = None if budget is None else replace(budget.mechanism, source=NoiseSource())
    training = config.training.over(config.rounds)
    augmentations = _check_augmentations(config, shape)
    kind = getattr(torch, dtype)
    about = training, loss, device, kind, head, precision, mechanism, augmentations
    try:
        learner = Learner(factory, *about)
        _check_output(learner, x, y, classes, name)
        if precision != "float32":
            _check_precision(Learner(factory, *about), x, y, name)
        if budget is not None:
            check_model(learner, x)
        if head is not None or config.training.head_rate != 1:
            _ = learner.cut  # so that a head that does not exist is refused now
    except FedspdError:
        raise
    except Exception as error:
        if _is_out_of_memory(error):
            raise ConfigError(
                f"{name}: its parameters do not fit into memory. Choose a smaller model."
            ) from None
        raise ConfigError(
            f"{name}: it does not work on examples of shape {shape}, with {_reason(error)}"
        ) from error
    return learner


def _check_augmentations(
    config: ExperimentConfig, shape: tuple[int, ...]
) -> Sequence[Augmentation]:
    if config.data.augment and len(shape) != 3:
        raise ConfigError(
            f"data.augment = {config.data.augment}: examples of shape {shape} are not images of "
            "[channels, height, width]. Leave it out."
        )
    return config.data.augment


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether torch had no room; on a CPU, it says so in words alone."""
    words = "can't allocate memory", "Storage size calculation overflowed"
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        word in str(error) for word in words
    )


def _reason(error: Exception) -> str:
    """Return the error in one line, without the C++ frames that torch adds to some."""
    message = str(error).partition("Exception raised from")[0]
    return " ".join(f"{type(error).__name__}: {message}".split())


def _factory_of(model: ModelFactory, shape: tuple[int, ...], classes: int) -> partial[nn.Module]:
    expected = "expected a function (shape, classes) -> nn.Module"
    if isinstance(model, nn.Module) or not callable(model):
        raise ConfigError(f"model: a value of type {type(model).__name__}; {expected}.")
    try:
        inspect.signature(model).bind(shape, classes)
    except TypeError as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise ConfigError(
            f"model: {name} cannot be called with a shape and a number of classes ({error}); "
            f"{expected}. Pass lambda shape, classes: {name}(...)."
        ) from None
    except ValueError:  # a function in C has no signature
        pass
    return partial(model, shape, classes)


def _check_output(learner: Learner, x: Tensor, y: Tensor | None, classes: int, name: str) -> None:
    """Refuse a model whose output does not fit the targets, before anything is written."""
    found = tuple(learner.outputs(learner.flat, x).shape)
    meaning, expected = "the shape of the targets", found if y is None else tuple(y.shape)
    if classes:
        meaning, expected = "a column for each class", (len(x), classes)
    is_built_in = not classes and found == (len(x),)
    hint = " Pass targets of shape [n], or a model of your own." if is_built_in else ""
    has_more_columns = bool(classes) and len(found) == 2 and found[1] > classes
    if found != expected and not has_more_columns:
        raise ConfigError(
            f"{name}: its output for {len(x)} examples has shape {found}; "
            f"expected {expected}, {meaning}.{hint}"
        )


def _check_processor(config: ExperimentConfig, device: torch.device) -> None:
    """Refuse bfloat16 where it would be slower than float32, or is not known to be faster."""
    key = f"precision = '{config.precision}'"
    if device.type != "cpu":
        raise ConfigError(f"{key}: not on a GPU (device = '{config.device}'); expected float32.")
    if not has_bfloat16():
        raise ConfigError(
            f"{key}: this processor is not known to have bfloat16 instructions, without which it "
            "is slower; expected float32."
        )


def _check_precision(learner: Learner, x: Tensor, y: Tensor | None, name: str) -> None:
    """Refuse a model that cannot take a training step in bfloat16."""
    if y is None:
        output = learner.outputs(learner.flat, x)
        y = (
            torch.zeros(len(x), dtype=torch.long)
            if learner.classifies
            else torch.zeros_like(output)
        )
    try:
        learner.train(learner.flat[None], Block([0], 1, [x], [y], len(x)), Key(0), rates=[0.0])
    except Exception as error:
        raise ConfigError(
            f"precision = '{learner.precision}': {name} has a layer that torch's autocast cannot "
            f"do in bfloat16, with {_reason(error)}; expected float32."
        ) from error


def device_of(config: ExperimentConfig) -> torch.device:
    """Return the device that the config names or that `auto` finds."""
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


def _choose_loss(config: ExperimentConfig, classes: int) -> Loss:
    fitting = "cross_entropy" if classes else "squared_error"
    if config.loss not in ("auto", fitting):
        kind = "data with classes" if classes else "a regression"
        raise ConfigError(f"loss = '{config.loss}': expected {fitting} for {kind}, or auto.")
    return cross_entropy if classes else squared_error
