"""A run from its start, or from its last checkpoint, to its result."""

import hashlib
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspd import topology
from fedspd.config import ExperimentConfig, as_dict, as_toml, config_hash, load, validate
from fedspd.core.errors import ConfigError, StorageError, WorkerError
from fedspd.core.keys import Key
from fedspd.engines import EngineFactory, engine_factory
from fedspd.engines.engine import BlockLostError, Engine
from fedspd.experiment.build import Experiment, ModelFactory, build_experiment
from fedspd.experiment.callbacks import Callback, Recorder, notify
from fedspd.experiment.events import metrics_fields, round_event, summary
from fedspd.experiment.newcomers import attach_newcomers, evaluate_newcomers
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

CHECKPOINT_SHARE = 0.05  # of the time may go into checkpoints
LOSSES = 3  # of blocks, in a row and without a new checkpoint, are borne


# ---- running


def run(
    config: ExperimentConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    data: Any = None,
    model: ModelFactory | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    engine: str = "processes",
    address: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> "Result":
    """Train, and return what came out.

    config     a config, a tree of its values, or the path of a TOML file; with resume: not needed
    data       arrays (x_train, y_train[, x_test, y_test]), a Source, a map-style dataset: instead of data.name
    model      a factory model(shape, classes) -> nn.Module: instead of model.name
    out        the run folder; without one the records live as long as the Result
    resume     continue the run in `out`
    workers    processes, default 1; on a Ray cluster actors, default one per CPU; the result does not depend on their number
    engine     processes of this machine, or ray (extra `ray`)
    address    of a Ray cluster: auto, or HOST:PORT of its head; default: one of its own on this machine
    callbacks  objects that follow the run, see `Callback`
    """
    if resume and out is None:
        raise ConfigError("resume = True: expected the folder of the run as out.")
    temporary = tempfile.TemporaryDirectory(prefix="fedspd-") if out is None else None
    folder = Path(temporary.name if temporary else str(out))
    settings = _resumed_config(folder, config) if resume else as_config(config)
    with engine_factory(engine, workers, address) as make:
        experiment = build_experiment(settings, data, model)
        record = _open(folder, experiment, resume)
        try:
            _train(experiment, record, make, [Recorder(record), *callbacks])
        finally:
            record.unlock()
    return Result(folder, experiment, record.read("result.json"), temporary)


def as_config(config: ExperimentConfig | Mapping[str, Any] | str | Path | None) -> ExperimentConfig:
    if isinstance(config, ExperimentConfig):
        return config
    if isinstance(config, str | Path):
        return load(Path(config))
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"A config cannot be a value of type {type(config).__name__}: expected a dict, the path of a TOML file or a Config."
        )
    return validate(config or {})


def _resumed_config(folder: Path, given: Any) -> ExperimentConfig:
    RunFolder.open(folder)
    stored = load(folder / "config.toml")
    if given is not None and config_hash(as_config(given)) != config_hash(stored):
        raise StorageError(
            f"'{folder}': the run was started with another config. Resume it without a config, or "
            "start a new run in another folder."
        )
    return stored


def _open(folder: Path, experiment: Experiment, resume: bool) -> RunFolder:
    if resume:
        _check_same(RunFolder.open(folder), experiment)
        return RunFolder.open(folder).lock()
    documents, about = _documents(experiment), _about(experiment)  # refuse before there is a folder
    record = RunFolder.create(folder)
    for name, content in documents.items():
        record.write(name, content)
    record.begin(about)
    return record


def _check_same(record: RunFolder, experiment: Experiment) -> None:
    """Refuse to continue a checkpoint with something else than it was made with."""
    before, now = record.read("run.json")["hashes"], _hashes(experiment)
    for name in now:
        if before[name] != now[name]:
            raise StorageError(
                f"'{record.folder}': the run was started with another {name} (hash "
                f"{before[name][:12]}, now {now[name][:12]}). Restore that {name}, or start a new "
                "run in another folder."
            )


def _hashes(experiment: Experiment) -> dict[str, str]:
    shapes = [
        (name, tuple(tensor.shape))
        for name, tensor in experiment.plan.learner.module.state_dict().items()
    ]
    model = hashlib.sha256(repr(shapes).encode()).hexdigest()
    return {
        "config": config_hash(experiment.config),
        "data": experiment.federation.description["hash"],
        "model": model,
    }


def _documents(experiment: Experiment) -> dict[str, Json | str]:
    """Return the documents of a run folder besides run.json, by file name."""
    config, graph = experiment.config, experiment.topology.at(1)
    described = topology.describe(experiment.topology, Key(config.seed), config.clusters)
    return {
        "config.toml": as_toml(config),
        "partition.json": experiment.federation.description,
        "topology.json": {**described, "list": [] if graph.server else graph.edges().tolist()},
    }


def _about(experiment: Experiment) -> Json:
    learner = experiment.plan.learner
    packages = {name: version(name) for name in ("fedspd", "torch", "numpy", "scipy")}
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


def _train(
    experiment: Experiment,
    record: RunFolder,
    make: EngineFactory,
    callbacks: Sequence[Callback],
) -> None:
    """To the end, however often a block is lost, as long as there is progress in between."""
    event: Json = {
        "event": "start",
        "rounds": experiment.config.rounds,
        "method": experiment.config.method,
    }
    done, losses = -1, 0
    with closing(make(experiment.plan)) as engine:
        while True:
            try:
                before, done = done, _restore(engine, record)
                losses = 0 if done > before else losses
                notify(callbacks, {**event, "round": done})
                return _complete(experiment, engine, record, done, callbacks)
            except BlockLostError as error:
                losses += 1
                if losses > LOSSES:
                    raise WorkerError(
                        f"{error}, {losses} times without a checkpoint in between. Look for the "
                        "cause, then resume the run."
                    ) from None
                event["alarms"] = [f"{error}: the run goes on from its last checkpoint."]


def _complete(
    experiment: Experiment,
    engine: Engine,
    record: RunFolder,
    done: int,
    callbacks: Sequence[Callback],
) -> None:
    if done <= experiment.config.rounds:
        _rounds(experiment, engine, record, done, callbacks)
        _final_phase(experiment, engine, record, callbacks)
    if not (record.folder / "result.json").exists():
        record.write("result.json", summary(record, engine.digests()))


def _restore(engine: Engine, record: RunFolder) -> int:
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


def _rounds(
    experiment: Experiment,
    engine: Engine,
    record: RunFolder,
    done: int,
    callbacks: Sequence[Callback],
) -> None:
    rounds, saved_at, cost = experiment.config.rounds, time.perf_counter(), 0.0
    for t in range(done + 1, rounds + 1):
        graph = experiment.topology.at(t)
        report = engine.round(t, graph)
        measures = (
            engine.measure() if t % experiment.config.evaluate_every == 0 or t == rounds else None
        )
        event = round_event(t, experiment.plan.learner.training.rate(t), report, measures)
        if experiment.config.topology.remove:
            event["edges"] = graph.edges().tolist()  # topology.json has those of round 1 alone
        notify(callbacks, event)
        now = time.perf_counter()
        if t == rounds or now - saved_at >= cost / CHECKPOINT_SHARE:
            with record.checkpoint(t, {"round": t}) as folder:
                engine.save(folder)
            saved_at = time.perf_counter()
            cost = saved_at - now


def _final_phase(
    experiment: Experiment, engine: Engine, record: RunFolder, callbacks: Sequence[Callback]
) -> None:
    t = experiment.config.rounds + 1
    joined = {"newcomers": _newcomers(experiment, engine, t)} if experiment.newcomers else {}
    report = engine.finish(t)
    event = {**round_event(t, None, report, engine.measure()), "event": "final", **joined}
    notify(callbacks, event)
    with record.checkpoint(t, {"round": t}) as folder:
        engine.save(folder)


def _newcomers(experiment: Experiment, engine: Engine, t: int) -> Json:
    assert experiment.newcomers is not None
    graph = attach_newcomers(
        experiment.topology.at(t - 1), experiment.newcomers.clients, Key(experiment.config.seed)
    )
    measures, sent = evaluate_newcomers(experiment.newcomers, graph, engine.shared(), t)
    return {
        **metrics_fields(measures),
        **sent,
        "edges": [] if graph.server else graph.edges().tolist(),
    }


# ---- what comes out


@dataclass(frozen=True)
class Result:
    folder: Path
    experiment: Experiment = field(repr=False)
    summary: Json = field(repr=False)
    temporary: Any = field(
        default=None, repr=False
    )  # keeps a folder that nobody asked for until the Result is gone

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Test accuracy of every client, after the final phase."""
        return np.array(self.summary["clients"]["accuracy"], dtype=float)

    @property
    def mixture(self) -> NDArray[np.float64]:
        return np.array(self.summary["clients"]["mixture"], dtype=float)

    def events(self) -> list[Json]:
        return list(RunFolder(self.folder).events())

    def state(self, client: int) -> Any:
        """All that the method holds for the client at the end, such as centers_CSP with C = 1."""
        return self._runner(client).state

    def predict(self, client: int, x: Tensor) -> Tensor:
        """What client's own model says of x, scaled as its training examples were."""
        runner = self._runner(client)
        return runner.plan.algorithm.predict(runner.plan.learner, runner.state, [x])[0]

    def model(self, client: int) -> nn.Module:
        """The client's own model as an ordinary module."""
        model_CP = self._runner(client).observe().model_CP
        if model_CP is None:
            raise ConfigError(
                f"method = '{self.summary['method']}': it does not end in one model per client. "
                "Use Result.predict."
            )
        return self.experiment.plan.learner.as_module(model_CP[0])

    def _runner(self, client: int) -> BlockRunner:
        if not 0 <= client < self.experiment.plan.clients:
            raise ConfigError(
                f"client = {client}: expected 0 to {self.experiment.plan.clients - 1}."
            )
        runner = BlockRunner(self.experiment.plan.part(range(client, client + 1)))
        found = RunFolder(self.folder).latest()
        assert found is not None
        runner.load(found[0])
        return runner


def with_method(config: ExperimentConfig, method: str) -> ExperimentConfig:
    """The same experiment by another method."""
    return validate({**as_dict(config), "method": method})
