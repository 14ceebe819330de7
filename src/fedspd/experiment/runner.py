"""Start, resume and finish a run."""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspd.config import (
    ExperimentConfig,
    as_dict,
    check_used,
    load,
    validate,
    without_other_methods,
)
from fedspd.core.errors import ConfigError, StorageError, WorkerError
from fedspd.core.keys import Key
from fedspd.engines import engine_factory
from fedspd.engines.engine import BlockLostError, Engine
from fedspd.experiment.build import Experiment, ModelFactory, build_budget, build_experiment
from fedspd.experiment.callbacks import Callback, Recorder, check_callbacks, notify
from fedspd.experiment.documents import about, documents
from fedspd.experiment.events import divergence_advice, metrics_fields, round_event, summary
from fedspd.experiment.interrupts import Interrupts, interrupts
from fedspd.experiment.newcomers import attach_newcomers, evaluate_newcomers
from fedspd.experiment.result import Result
from fedspd.experiment.resuming import check_same, extend, resumed_config
from fedspd.experiment.spending import add_privacy, newcomers_privacy, silence_alarm
from fedspd.experiment.validation import BestRound
from fedspd.privacy.budget import describe, warnings
from fedspd.privacy.ledger import RunLedger
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RESTORE, RunFolder
from fedspd.storage.temporary import TemporaryFolder

Config = ExperimentConfig | Mapping[str, Any] | str | Path
CHECKPOINT_SHARE = 0.05  # of the time goes into checkpoints, at most
MAX_LOSSES = 3  # of blocks, without a new checkpoint in between


# ---- starting


def run(
    config: Config | None = None,
    *,
    data: Any = None,
    model: ModelFactory | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    engine: str = "processes",
    address: str | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Result:
    """Train a personalised model for every client, and return the result.

    config     a config, a tree of its values, or the path of a TOML file; not needed to resume
    data       arrays (x_train, y_train[, x_test, y_test]), a table, a dataset or a pair of them, or
               a list or dict of these for each client; replaces data.name
    model      a factory model(shape, classes) -> nn.Module; replaces model.name
    out        the run folder; without it, the records exist as long as the Result
    resume     continue the run in `out` from its last checkpoint; with a config of more rounds,
               a finished one too
    workers    the number of processes, default 1, or of actors on a Ray cluster, default one per
               CPU; the result does not depend on it
    engine     "processes" of this machine, or "ray" (extra `ray`)
    address    of a Ray cluster: "auto", or HOST:PORT of its head; by default, Ray starts one here
    callbacks  objects that follow the run: see `Callback`
    progress   show a progress bar; default: in a terminal or a notebook
    """
    if resume and out is None:
        raise ConfigError("resume = True: expected the folder of the run as out.")
    temporary = TemporaryFolder() if out is None else None
    folder = temporary.path if temporary else as_path("out", out)
    if resume:
        settings = resumed_config(folder, None if config is None else as_config(config))
    else:
        settings = as_config(config)
        check_used(settings, [settings.method])
    check_callbacks(callbacks)
    with (
        engine_factory(engine, workers, address) as make_engine,
        interrupts() as stop,
        ExitStack() as shown,
    ):
        experiment = build_experiment(settings, data, model)
        run_folder = _resume(folder, experiment) if resume else _start(folder, experiment)
        followers = [Recorder(run_folder), *callbacks]
        try:
            if is_watched() if progress is None else progress:
                followers.append(shown.enter_context(_progress()))
            with closing(make_engine(experiment.plan)) as made:
                has_scores = experiment.plan.validation is not None
                best = BestRound(settings.patience) if has_scores else None
                about_run = stop, _new_ledger(experiment), best
                _Training(experiment, made, run_folder, followers, *about_run).complete()
        finally:
            run_folder.unlock()
    where = folder.absolute()  # a notebook may change its folder
    return Result(where, experiment, run_folder.read_complete("result.json"), temporary)


def is_watched() -> bool:
    """Return whether a person sees what is printed: in a terminal or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _progress() -> Any:
    from fedspd.experiment.progress import RunProgress  # rich is slow to import

    return RunProgress()


def as_config(config: Config | None) -> ExperimentConfig:
    """Return the config that a caller gave as a config, a tree, a path or not at all."""
    if isinstance(config, ExperimentConfig):
        return config
    if isinstance(config, str | Path):
        return load(Path(config))
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"config: a value of type {type(config).__name__}; expected a dict, the path of a TOML "
            "file or an ExperimentConfig."
        )
    return validate(config or {})


def as_path(name: str, value: Any) -> Path:
    """Return the path of a folder that a caller gave as an argument of this name."""
    if not isinstance(value, str | Path):
        kind = type(value).__name__
        raise ConfigError(f"{name}: a value of type {kind}; expected the path of a folder.")
    return Path(value)


def _resume(folder: Path, experiment: Experiment) -> RunFolder:
    run_folder = RunFolder.open(folder)
    if experiment.config.rounds > load(folder / "config.toml").rounds:
        return extend(run_folder, experiment)
    check_same(run_folder, experiment)
    return run_folder.lock()


def _start(folder: Path, experiment: Experiment) -> RunFolder:
    contents, description = documents(experiment), about(experiment)  # both may still refuse
    run_folder = RunFolder.create(folder)
    for name, content in contents.items():
        run_folder.write(name, content)
    run_folder.begin(description)
    return run_folder


def _new_ledger(experiment: Experiment) -> RunLedger | None:
    privacy = experiment.config.privacy
    return RunLedger(experiment.plan.clients, privacy.delta) if privacy.is_on else None


# ---- training


@dataclass(frozen=True)
class _Training:
    """A run in progress: its experiment, its engine, its folder and its callbacks."""

    experiment: Experiment
    engine: Engine
    run_folder: RunFolder
    callbacks: Sequence[Callback]
    interrupts: Interrupts
    ledger: RunLedger | None = None  # where examples are private
    best: BestRound | None = None  # with validation examples

    def complete(self) -> None:
        """Train to the end; go back to the last checkpoint whenever a block is lost."""
        config, found = self.experiment.config, self._warnings()
        start: Json = {"event": "start", "rounds": config.rounds, "method": config.method}
        start["config"] = without_other_methods(as_dict(config), config.method)
        start |= {"alarms": found} if found else {}
        if (budget := build_budget(config)) is not None:
            start["privacy"] = describe(budget)
        done, losses = RunPosition(-1), 0
        while True:
            try:
                before, done = done, self._restore()
                losses = 0 if done.round > before.round else losses
                shown = config.rounds + 1 if done.is_final else done.round
                notify(self.callbacks, {**start, "round": shown})
                self.interrupts.check()
                return self._complete_from(done)
            except BlockLostError as error:
                losses += 1
                if losses > MAX_LOSSES:
                    raise WorkerError(
                        f"{error}, {losses} times without a checkpoint in between. Look for the "
                        "cause, then resume the run."
                    ) from None
                start["alarms"] = [f"{error}: the run goes on from its last checkpoint."]

    def _restore(self) -> "RunPosition":
        """Load the last checkpoint; return how far it is."""
        latest = self.run_folder.latest()
        if latest is None:
            self.run_folder.rewind(0)
            self.engine.begin()
            self._restore_ledger()
            return RunPosition(0)
        folder, content = latest
        if content.get("data", self._data_hash) != self._data_hash:
            raise StorageError(f"'{folder}': the checkpoint of another run. {RESTORE}")
        self.engine.load(folder)
        self.run_folder.rewind(content["events"])
        self._restore_ledger()
        if self.best is not None:
            self.best.restore(content["best"])
        is_final = content.get("is_final", content["round"] > self.experiment.config.rounds)
        return RunPosition(int(content["round"]), is_final, content.get("stopped"))

    @property
    def _data_hash(self) -> str:
        return str(self.experiment.federation.description["hash"])

    def _restore_ledger(self) -> None:
        if self.ledger is not None:
            self.ledger.restore(self.run_folder.events())
            self.engine.restore_accounts(self.ledger.releases, self.ledger.silent)

    def _complete_from(self, done: "RunPosition") -> None:
        if not done.is_final:
            self._run_final_phase(self._run_rounds(done))
        if not (self.run_folder.folder / "result.json").exists():
            names = self.experiment.federation.names_of_classes
            result = summary(self.run_folder, self.engine.digests(), names)
            self.run_folder.write("result.json", result)

    def _run_rounds(self, done: "RunPosition") -> "RunPosition":
        """Run the rounds after `done`, with checkpoints as often as their cost allows."""
        rounds = self.experiment.config.rounds
        saved_at, cost = time.perf_counter(), 0.0
        while done.round < rounds and done.stopped is None:
            event = self._run_round(done.round + 1)
            stopped = notify(self.callbacks, event) or self._stop_reason(event)
            done = RunPosition(done.round + 1, stopped=stopped)
            self.interrupts.has_unsaved_rounds = True
            now, is_interrupted = time.perf_counter(), self.interrupts.is_requested
            is_last = done.round == rounds or done.stopped is not None or is_interrupted
            if is_last or now - saved_at >= cost / CHECKPOINT_SHARE:
                self._save(done)
                saved_at = time.perf_counter()
                cost = saved_at - now
            self.interrupts.check()
        return done

    def _stop_reason(self, event: Json) -> str | None:
        has_score = self.best is not None and "accuracy" in event
        return self.best.stop_reason(event["round"]) if self.best and has_score else None

    def _run_round(self, t: int) -> Json:
        """Run round t and return its event."""
        config, graph = self.experiment.config, self.experiment.topology.at(t)
        report = self.engine.round(t, graph)
        is_evaluated = t % config.evaluate_every == 0 or t == config.rounds
        measures = self.engine.measure() if is_evaluated else None
        if self.best is not None and measures is not None and self.best.improves(t, measures):
            self.engine.keep_best()
        rate = self.experiment.plan.learner.training.rate(t)
        event = round_event(t, rate, report, measures, divergence_advice(config))
        if self.ledger is not None:
            is_public = self.experiment.plan.algorithm.HAS_PUBLIC_ANNOUNCEMENTS
            add_privacy(event, self.ledger, report, graph, is_public)
        if config.topology.remove:
            event["edges"] = graph.edges().tolist()  # topology.json has those of round 1 alone
        return event

    def _run_final_phase(self, done: "RunPosition") -> None:
        """Finish from the best round's states, if rounds were compared, and else the last one's."""
        config = self.experiment.config
        t, about = done.round + 1, Json()
        if self.best is not None and self.best.round:
            self.engine.take_best()
            about["best_round"] = self.best.round
        if done.stopped is not None:
            about["stopped"] = done.stopped
        if self.experiment.newcomers:
            about |= self._newcomers(t)
        report = self.engine.finish(t)
        event = round_event(t, None, report, self.engine.measure(), divergence_advice(config))
        event["alarms"] += self._warnings() + silence_alarm(
            self.ledger.silent if self.ledger else ()
        )
        notify(self.callbacks, {**event, "event": "final", **about})
        self._save(RunPosition(t, is_final=True, stopped=done.stopped))

    def _warnings(self) -> list[str]:
        """Return what a reader of the scores should know about the method and the data."""
        plan, config = self.experiment.plan, self.experiment.config
        found = [*self.experiment.federation.notes, *plan.algorithm.warnings(config.rounds)]
        if earlier := self.run_folder.read("run.json").get("continued_from", []):
            seen = (event.get("bodies", 1) for event in self.run_folder.events())
            bodies = max(seen, default=1)
        for before in earlier:
            found += plan.algorithm.continuation_warnings(before, config.rounds, bodies)
        if config.privacy.is_on:
            sends_models = "exchange" not in plan.algorithm.UNUSED_KEYS
            found += warnings(config.privacy, int(plan.train.counts_C.min()), sends_models)
        return found

    def _newcomers(self, t: int) -> Json:
        """Return the newcomers' scores, traffic and edges, and with privacy what they received."""
        plan, key = self.experiment.newcomers, Key(self.experiment.config.seed)
        assert plan is not None
        graph = attach_newcomers(self.experiment.topology.at(t - 1), plan.clients, key)
        offers = self.engine.share()
        measures, sent = evaluate_newcomers(plan, graph, offers, t)
        edges = [] if graph.server else graph.edges().tolist()
        about: Json = {"newcomers": {**metrics_fields(measures), **sent, "edges": edges}}
        if self.ledger is not None:
            about["privacy"] = newcomers_privacy(self.ledger, graph, offers)
        return about

    def _save(self, done: "RunPosition") -> None:
        best = {} if self.best is None else {"best": self.best.as_json()}
        content = {**dataclasses.asdict(done), "data": self._data_hash, **best}
        kept = 2 if done.is_final else 1  # further rounds start before the final phase
        with self.run_folder.checkpoint(done.round, content, kept) as folder:
            self.engine.save(folder)
        self.interrupts.has_unsaved_rounds = False


@dataclass(frozen=True)
class RunPosition:
    """How far a run is."""

    round: int  # done; the final phase counts as one more
    is_final: bool = False
    stopped: str | None = None  # why no further round will run
