"""From a config to a finished run: the only place that knows everything."""

import hashlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspd import models, topology
from fedspd.config import Base, as_dict, as_toml, config_hash, load, method_class, method_options, validate
from fedspd.core.block import Block
from fedspd.core.errors import ConfigError, FedspdError, RecordError
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, Loss, Sgd, cross_entropy, keyed_randomness, squared_error
from fedspd.data.federation import Federation
from fedspd.data.mixtures import federate
from fedspd.data.own import resolve
from fedspd.data.sources import Source
from fedspd.engines.block import BlockRunner, Plan, Truth
from fedspd.engines.simulator import Simulator
from fedspd.events import measured, round_event, summary
from fedspd.newcomers import attached, welcome
from fedspd.record import Json, Record

Listener = Callable[[Json], None]
ModelFactory = Callable[[tuple[int, ...], int], nn.Module]
CHECKPOINT_SHARE = 0.05  # of the time may go into checkpoints
USUAL_EXAMPLES = 300


@dataclass(frozen=True)
class Experiment:
    """A config and everything that it stands for."""

    config: Base
    federation: Federation
    topology: topology.Topology
    plan: Plan
    newcomers: Plan | None  # clients that join after training


def build(config: Base, data: Any = None, model: ModelFactory | None = None) -> Experiment:
    """`data` and `model` stand in for data.name and model.name: objects of the user's own."""
    key = Key(config.seed)
    network = topology.build(config.topology.options(), config.clients, key)
    federation = _federation(config, data, key)
    if config.clusters > (fewest := int(np.diff(federation.train.start).min())):
        raise ConfigError(f"clusters = {config.clusters}: a client has only {fewest} examples; expected at most one cluster per example.")
    algorithm = method_class(config)(clusters=config.clusters, **method_options(config))
    plan = Plan(algorithm, _learner(config, federation, model), *_blocks(config, federation, network), federation.distributions, key)
    last = config.clients + config.holdout_clients
    newcomers = plan.part(range(config.clients, last)) if config.holdout_clients else None
    return Experiment(config, federation, network, plan.part(range(config.clients)), newcomers)


def _blocks(config: Base, federation: Federation, network: topology.Topology) -> tuple[Block, Block, Truth]:
    """Training and test examples of every client, newcomers included, and the truth of the former."""
    server, start = network.at(1).server, federation.train.start
    blocks = (federation.block(range(federation.clients), part) for part in ("train", "test"))
    train, test = (replace(block, network=config.clients, server=server) for block in blocks)
    return train, test, [federation.train.truth[low:high] for low, high in pairwise(start)]


def _federation(config: Base, data: Any, key: Key) -> Federation:
    source = resolve(config.data.name if data is None else data)
    second = resolve(config.data.second) if config.data.second is not None else None
    clients = config.clients + config.holdout_clients
    examples = config.data.examples or _usual_examples(source, clients)
    return federate(source, config.data.options(clients, examples), key.of("data"), second)


def _usual_examples(source: Source, clients: int) -> int:
    """A fifth stays in the pool, so that a mixture can deal clients more of one distribution than of another."""
    return max(2, min(USUAL_EXAMPLES, int(0.8 * len(source.train.y) / clients)))


def _learner(config: Base, federation: Federation, model: ModelFactory | None) -> Learner:
    shape, classes, table = federation.shape, federation.classes, config.model
    name = table.name or ("cnn" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp")
    factory = partial(models.build, name, shape, classes, small=table.small, hidden=table.hidden)
    if model is not None:
        name, factory = "the given model", partial(model, shape, classes)
    sgd, loss, device = Sgd(**dict(config.sgd)), _loss(config, classes), _device(config)  # type: ignore[attr-defined]
    try:
        learner = Learner(factory, sgd, loss, device, getattr(torch, config.dtype))
        _check_output(learner, federation, name)
    except FedspdError:
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"model.name = '{name}': it does not work on examples of shape {shape}, with {said}") from error
    return learner


def _check_output(learner: Learner, federation: Federation, name: str) -> None:
    """Refuse a model whose output does not go with the targets, before anything is written."""
    x, y, classes = federation.train.x[:2], federation.train.y[:2], federation.classes
    expected = (len(y), classes) if classes else tuple(y.shape)
    found = tuple(learner.outputs(learner.flat, x).shape)
    if found != expected and not (classes and len(found) == 2 and found[1] > classes):
        meaning = "a column for each class" if classes else "the shape of the targets"
        raise ConfigError(f"model.name = '{name}': its output for 2 examples has shape {found}; expected {expected}, {meaning}.")


def _device(config: Base) -> torch.device:
    try:
        device = torch.empty(0, device=config.device).device
    except (RuntimeError, AssertionError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device = '{config.device}': expected cpu, or cuda where there is one.")
    return device


def _loss(config: Base, classes: int) -> Loss:
    fitting = "cross_entropy" if classes else "squared_error"
    if config.loss not in ("auto", fitting):
        kind = "data with classes" if classes else "a regression"
        raise ConfigError(f"loss = '{config.loss}': expected {fitting} for {kind}, or auto.")
    return cross_entropy if classes else squared_error


# ---- running


def run(
    config: Base | Mapping[str, Any] | str | Path | None = None,
    *,
    data: Any = None,
    model: ModelFactory | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int = 1,
    listener: Listener | None = None,
) -> "Result":
    """Train, and return what came out.

    config     a config, a tree of its values, or the path of a TOML file; with resume: not needed
    data       arrays (x_train, y_train[, x_test, y_test]), a Source, a map-style dataset: instead of data.name
    model      a factory model(shape, classes) -> nn.Module: instead of model.name
    out        the run folder; without one the records live as long as the Result
    resume     continue the run in `out`
    workers    processes; the result does not depend on their number
    listener   called with every event of the run, as it is recorded
    """
    if workers < 1:
        raise ConfigError(f"workers = {workers}: expected at least 1.")
    if resume and out is None:
        raise ConfigError("resume = True needs the run folder to continue: give it as out.")
    temporary = tempfile.TemporaryDirectory(prefix="fedspd-") if out is None else None
    folder = Path(temporary.name if temporary else str(out))
    settings = _resumed_config(folder, config) if resume else as_config(config)
    experiment = build(settings, data, model)
    record = _open(folder, experiment, resume)
    try:
        _train(experiment, record, workers, listener or (lambda event: None))
    finally:
        record.release()
    return Result(folder, experiment, record.read("result.json"), temporary)


def as_config(config: Base | Mapping[str, Any] | str | Path | None) -> Base:
    if isinstance(config, Base):
        return config
    if isinstance(config, str | Path):
        return load(Path(config))
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"A config cannot be a value of type {type(config).__name__}: expected a dict, the path of a TOML file or a Config."
        )
    return validate(config or {})


def _resumed_config(folder: Path, given: Any) -> Base:
    Record.open(folder)
    stored = load(folder / "config.toml")
    if given is not None and config_hash(as_config(given)) != config_hash(stored):
        raise RecordError(f"The config is not the one that the run in '{folder}' was started with: resume without one, or start a new run.")
    return stored


def _open(folder: Path, experiment: Experiment, resume: bool) -> Record:
    if resume:
        _check_same(Record.open(folder), experiment)
        return Record.open(folder).hold()
    documents = _documents(experiment)  # first: what can still be refused is refused before there is a folder
    record = Record.create(folder)
    for name, content in documents.items():
        record.write(name, content)
    return record


def _check_same(record: Record, experiment: Experiment) -> None:
    """Refuse to continue a checkpoint with something else than it was made with."""
    before, now = record.read("run.json")["hashes"], _hashes(experiment)
    for name in now:
        if before[name] != now[name]:
            raise RecordError(
                f"The run in '{record.folder}' was started with another {name} (hash {before[name][:12]}, now {now[name][:12]}): "
                "its checkpoint does not fit. Restore it, or start a new run with --out."
            )


def _hashes(experiment: Experiment) -> dict[str, str]:
    shapes = [(name, tuple(tensor.shape)) for name, tensor in experiment.plan.learner.module.state_dict().items()]
    model = hashlib.sha256(repr(shapes).encode()).hexdigest()
    return {"config": config_hash(experiment.config), "data": experiment.federation.manifest["hash"], "model": model}


def _documents(experiment: Experiment) -> dict[str, Json | str]:
    """What a run folder says of its run, by file; run.json comes last, and with it the run has begun."""
    config, graph = experiment.config, experiment.topology.at(1)
    described = topology.describe(experiment.topology, Key(config.seed), config.clusters)
    return {
        "config.toml": as_toml(config),
        "manifest.json": experiment.federation.manifest,
        "topology.json": {**described, "list": [] if graph.server else graph.edges().tolist()},
        "run.json": _about(experiment),
    }


def _about(experiment: Experiment) -> Json:
    learner = experiment.plan.learner
    packages = {name: version(name) for name in ("fedspd", "torch", "numpy", "scipy")}
    return {
        "versions": {"python": platform.python_version(), **packages},
        "machine": {"system": platform.platform(), "instructions": torch.backends.cpu.get_cpu_capability(), "device": str(learner.device)},
        "model": {"size": learner.size, "weights": learner.weights, "memory": "channels_last" if learner.channels_last else "contiguous"},
        "hashes": _hashes(experiment),
        "config": as_dict(experiment.config),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
    }


def _train(experiment: Experiment, record: Record, workers: int, listener: Listener) -> None:
    config = experiment.config
    with _simulator(experiment.plan, workers) as engine:
        done = _restore(engine, record)
        listener({"event": "start", "round": done, "rounds": config.rounds, "method": config.method})
        if done <= config.rounds:
            _rounds(experiment, engine, record, done, listener)
            _final_phase(experiment, engine, record, listener)
        if not (record.folder / "result.json").exists():
            record.write("result.json", summary(record, engine.digests()))


@contextmanager
def _simulator(plan: Plan, workers: int) -> Iterator[Simulator]:
    engine = Simulator(plan, workers)
    try:
        yield engine
    finally:
        engine.close()


def _restore(engine: Simulator, record: Record) -> int:
    """The rounds that are done; the final phase counts as one more."""
    latest = record.latest()
    if latest is None:
        record.rewind(0)
        engine.begin()
        return 0
    folder, content = latest
    engine.load(folder)
    record.rewind(content["events"])
    return int(content["round"])


def _rounds(experiment: Experiment, engine: Simulator, record: Record, done: int, listener: Listener) -> None:
    rounds, saved_at, cost = experiment.config.rounds, time.perf_counter(), 0.0
    for t in range(done + 1, rounds + 1):
        report = engine.round(t, experiment.topology.at(t))
        measures = engine.measure() if t % experiment.config.evaluate_every == 0 or t == rounds else None
        event = round_event(t, experiment.plan.learner.sgd.rate(t), report, measures)
        record.append(event)
        listener(event)
        now = time.perf_counter()
        if t == rounds or now - saved_at >= cost / CHECKPOINT_SHARE:
            with record.checkpoint(t, {"round": t}) as folder:
                engine.save(folder)
            saved_at = time.perf_counter()
            cost = saved_at - now


def _final_phase(experiment: Experiment, engine: Simulator, record: Record, listener: Listener) -> None:
    t = experiment.config.rounds + 1
    joined = {"newcomers": _newcomers(experiment, engine, t)} if experiment.newcomers else {}
    report = engine.finish(t)
    event = {**round_event(t, None, report, engine.measure()), "event": "final", **joined}
    record.append(event)
    with record.checkpoint(t, {"round": t}) as folder:
        engine.save(folder)
    listener(event)


def _newcomers(experiment: Experiment, engine: Simulator, t: int) -> Json:
    assert experiment.newcomers is not None
    graph = attached(experiment.topology.at(t - 1), experiment.newcomers.clients, Key(experiment.config.seed))
    measures, sent = welcome(experiment.newcomers, graph, engine.shared(), t)
    return {**measured(measures), **sent}


# ---- what comes out


@dataclass(frozen=True)
class Result:
    folder: Path
    experiment: Experiment
    summary: Json
    temporary: Any = None  # keeps a folder that nobody asked for until the Result is gone

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Test accuracy of every client, after the final phase."""
        return np.array(self.summary["clients"]["accuracy"], dtype=float)

    @property
    def mixture(self) -> NDArray[np.float64]:
        return np.array(self.summary["clients"]["mixture"], dtype=float)

    def events(self) -> list[Json]:
        return list(Record(self.folder).events())

    def state(self, client: int) -> Any:
        """All that the method holds for the client at the end, such as centers_CSP with C = 1."""
        return self._runner(client).state

    def predict(self, client: int, x: Tensor) -> Tensor:
        """What client's own model says of x, scaled as its training examples were."""
        runner = self._runner(client)
        return runner.plan.algorithm.predict(runner.plan.learner, runner.state, [x])[0]

    def model(self, client: int) -> nn.Module:
        """The client's own model as an ordinary module."""
        state, learner = self.state(client), self.experiment.plan.learner
        vector = getattr(state, "personal_CP", getattr(state, "model_CP", None))
        if vector is None:
            raise ConfigError(f"method = '{self.summary['method']}' does not end in one model per client: use Result.predict.")
        with keyed_randomness(Key(0), learner.device):  # a notebook's own draws stay as they were
            module = learner.factory().to(device=learner.device, dtype=learner.dtype)
        module.load_state_dict(learner.export(vector[0]))
        return module.eval()

    def _runner(self, client: int) -> BlockRunner:
        if not 0 <= client < self.experiment.plan.clients:
            raise ConfigError(f"client = {client}: expected 0 to {self.experiment.plan.clients - 1}.")
        runner = BlockRunner(self.experiment.plan.part(range(client, client + 1)))
        found = Record(self.folder).latest()
        assert found is not None
        runner.load(found[0])
        return runner


def with_method(config: Base, method: str) -> Base:
    """The same experiment by another method."""
    return validate({**as_dict(config), "method": method})
