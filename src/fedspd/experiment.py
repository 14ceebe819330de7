"""From a config to a finished run: the only place that knows everything."""

import hashlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspd import models, topology
from fedspd.algorithms import METHODS
from fedspd.config import Base, as_dict, as_toml, config_hash, load, method_options, validate
from fedspd.core.errors import ConfigError, RecordError
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, Sgd, cross_entropy, squared_error
from fedspd.data.federation import Federation
from fedspd.data.mixtures import federate
from fedspd.data.own import resolve
from fedspd.data.sources import Source
from fedspd.engines.block import BlockRunner, Measures, Plan
from fedspd.engines.simulator import RoundReport, Simulator
from fedspd.metrics import Spread, purity, switched_clients
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


def build(config: Base, data: Any = None, model: ModelFactory | None = None) -> Experiment:
    """`data` and `model` stand in for data.name and model.name: objects of the user's own."""
    key = Key(config.seed)
    network = topology.build(config.topology.options(), config.clients, key.of("topology"))
    federation = _federation(config, data, key)
    if config.clusters > (fewest := int(np.diff(federation.train.start).min())):
        raise ConfigError(f"clusters = {config.clusters}: a client has only {fewest} examples; expected at most one cluster per example.")
    algorithm = METHODS[config.method](clusters=config.clusters, **method_options(config))
    train, test = (federation.block(range(config.clients), part) for part in ("train", "test"))
    truth = [federation.train.truth[low:high] for low, high in zip(federation.train.start, federation.train.start[1:], strict=False)]
    plan = Plan(algorithm, _learner(config, federation, model), train, test, truth, federation.distributions, key)
    return Experiment(config, federation, network, plan)


def _federation(config: Base, data: Any, key: Key) -> Federation:
    source = resolve(config.data.name if data is None else data)
    second = resolve(config.data.second) if config.data.second is not None else None
    examples = config.data.examples or _usual_examples(source, config.clients)
    return federate(source, config.data.options(config.clients, examples), key.of("data"), second)


def _usual_examples(source: Source, clients: int) -> int:
    """A fifth stays in the pool, so that a mixture can deal clients more of one distribution than of another."""
    return max(2, min(USUAL_EXAMPLES, int(0.8 * len(source.train.y) / clients)))


def _learner(config: Base, federation: Federation, model: ModelFactory | None) -> Learner:
    shape, classes = federation.shape, federation.classes
    usual = "cnn" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp"
    table = config.model
    factory = partial(models.build, table.name or usual, shape, classes, small=table.small, hidden=table.hidden)
    if model is not None:
        factory = partial(model, shape, classes)
    loss = {"auto": cross_entropy if classes else squared_error, "cross_entropy": cross_entropy, "squared_error": squared_error}
    try:
        device = torch.empty(0, device=config.device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device = '{config.device}': {str(error).splitlines()[0]}; expected cpu, or cuda where there is one.") from None
    sgd = Sgd(**dict(config.sgd))  # type: ignore[attr-defined]
    return Learner(factory, sgd, loss[config.loss], device, getattr(torch, config.dtype))


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
    return load(Path(config)) if isinstance(config, str | Path) else validate(config or {})


def _resumed_config(folder: Path, given: Any) -> Base:
    Record.open(folder)
    stored = load(folder / "config.toml")
    if given is not None and config_hash(as_config(given)) != config_hash(stored):
        raise RecordError(f"The config is not the one that the run in '{folder}' was started with: resume without one, or start a new run.")
    return stored


def _open(folder: Path, experiment: Experiment, resume: bool) -> Record:
    if not resume:
        record = Record.create(folder)
        _describe(record, experiment)
        return record
    record = Record.open(folder).hold()
    about = record.read("run.json")
    for name, found in (("config", config_hash(experiment.config)), ("data", experiment.federation.manifest["hash"])):
        if about["hashes"][name] != found:
            record.release()
            raise RecordError(
                f"The run in '{folder}' was started with another {name} (hash {about['hashes'][name][:12]}, now {found[:12]}): "
                "its checkpoint does not fit. Restore it, or start a new run with --out."
            )
    return record


def _describe(record: Record, experiment: Experiment) -> None:
    config, learner = experiment.config, experiment.plan.learner
    record.write("config.toml", as_toml(config))
    record.write("manifest.json", experiment.federation.manifest)
    graph = experiment.topology.at(1)
    described = topology.describe(experiment.topology, Key(config.seed), config.clusters)
    record.write("topology.json", {**described, "list": [] if graph.server else graph.edges().tolist()})
    packages = {name: version(name) for name in ("fedspd", "torch", "numpy", "scipy")}
    about = {
        "versions": {"python": platform.python_version(), **packages},
        "machine": {"system": platform.platform(), "instructions": torch.backends.cpu.get_cpu_capability(), "device": str(learner.device)},
        "model": {"size": learner.size, "weights": learner.weights, "memory": "channels_last" if learner.channels_last else "contiguous"},
        "hashes": {"config": config_hash(config), "data": experiment.federation.manifest["hash"]},
        "config": as_dict(config),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
    }
    record.write("run.json", about)


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
        event = round_event(experiment, t, report, measures)
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
    report = engine.finish(t)
    event = {**round_event(experiment, t, report, engine.measure()), "event": "final"}
    record.append(event)
    with record.checkpoint(t, {"round": t}) as folder:
        engine.save(folder)
    listener(event)


# ---- what is written down


def round_event(experiment: Experiment, t: int, report: RoundReport, measures: Measures | None) -> Json:
    event: Json = {"event": "round", "round": t, "lr": experiment.plan.learner.sgd.rate(t), "steps": report.steps}
    event["traffic"] = [traffic.as_json() for traffic in report.traffic]
    event["bytes"] = {
        "multicast": sum(traffic.multicast_bytes for traffic in report.traffic),
        "point_to_point": sum(traffic.point_to_point_bytes for traffic in report.traffic),
    }
    event["seconds"] = {step: round(seconds, 6) for step, seconds in report.seconds.items()}
    if measures is not None:
        event |= _measured(measures)
    return event


def _measured(measures: Measures) -> Json:
    found: Json = {"accuracy": _plain(measures.accuracy_C), "test_loss": _plain(measures.test_loss_C), "alarms": alarms(measures)}
    if measures.loss_C is not None:
        found["loss"] = _plain(measures.loss_C)
    if measures.mixture_CS is not None:
        found["mixture"] = _plain(measures.mixture_CS)
    if measures.table_CSD is not None:
        table = measures.table_CSD.sum(0)
        found |= {"table": table.tolist(), "purity": _plain(np.array(purity(table)))}
    if measures.moments is not None:
        found["consensus"] = _plain(measures.moments.consensus_distance())
    return found


def alarms(measures: Measures) -> list[str]:
    """What a person should look at before believing the numbers."""
    found = []
    if measures.loss_C is not None and not np.isfinite(measures.loss_C).all():
        found.append(f"The loss is not finite at clients {_some(np.flatnonzero(~np.isfinite(measures.loss_C)))}: try a smaller sgd.lr.")
    if measures.table_CSD is not None:
        for s in np.flatnonzero(measures.table_CSD.sum((0, 2)) == 0):
            found.append(f"Cluster {s} is empty at every client.")
        if len(switched := switched_clients(measures.table_CSD)):
            found.append(f"Labels are switched at clients {_some(switched)}: they name the clusters unlike the rest.")
    return found


def _some(clients: NDArray[np.int64]) -> str:
    return ", ".join(map(str, clients[:8])) + (f" and {len(clients) - 8} more" if len(clients) > 8 else "")


def _plain(numbers: NDArray[np.float64]) -> Any:
    """As lists; what JSON has no number for becomes null; nine digits, which adding up in another order does not reach."""
    rounded = [float(f"{x:.9g}") if np.isfinite(x) else None for x in numbers.ravel()]
    return np.array(rounded, dtype=object).reshape(numbers.shape).tolist()


def summary(record: Record, digests: list[str]) -> Json:
    """The end of a run, from its events."""
    events = list(record.events())
    rounds, final = [e for e in events if e["event"] == "round"], events[-1]
    before = next(e for e in reversed(rounds) if "accuracy" in e)
    return {
        "method": record.read("run.json")["config"]["method"],
        "rounds": len(rounds),
        "accuracy": _spread(final),
        "accuracy_before_final_phase": _spread(before),
        "clients": {"accuracy": final["accuracy"], "test_loss": final["test_loss"], "mixture": final.get("mixture")},
        "purity": final.get("purity"),
        "consensus": final.get("consensus"),
        "models_sent": sum(len(t["models"]) for e in rounds for t in e["traffic"]),
        "bytes": {kind: sum(e["bytes"][kind] for e in rounds) for kind in ("multicast", "point_to_point")},
        "steps": sum(e["steps"] for e in [*rounds, final]),
        "seconds": round(sum(e["seconds"]["total"] for e in [*rounds, final]), 3),
        "alarms": final["alarms"],
        "hash": hashlib.sha256("".join(digests).encode()).hexdigest(),
    }


def _spread(event: Json) -> Json:
    scores = np.array([np.nan if score is None else score for score in event["accuracy"]], dtype=float)
    return {name: _plain(np.array(value)) for name, value in asdict(Spread.of(scores)).items()}


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

    def predict(self, client: int, x: Tensor) -> Tensor:
        """What client's own model says of x, scaled as its training examples were."""
        runner = self._runner(client)
        return runner.plan.algorithm.predict(runner.plan.learner, runner.state, [x])[0]

    def model(self, client: int) -> nn.Module:
        """The client's own model as an ordinary module."""
        state, learner = self._runner(client).state, self.experiment.plan.learner
        vector = getattr(state, "personal_CP", getattr(state, "model_CP", None))
        if vector is None:
            raise ConfigError(f"method = '{self.summary['method']}' does not end in one model per client: use Result.predict.")
        module = learner.factory()
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
