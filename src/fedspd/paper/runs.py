"""Run an experiment: find what is missing, run it, and keep the records."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedspd.comparison.jobs import Job
from fedspd.comparison.scheduler import Machine, run_jobs
from fedspd.config import ExperimentConfig
from fedspd.core.errors import DataError, FedspdError
from fedspd.data.custom import load_source
from fedspd.data.sources import is_official, is_present
from fedspd.experiment.callbacks import Callback
from fedspd.experiment.sharing import rounds_key
from fedspd.paper.definition import Cell, PaperExperiment, ReadingName, ScaleName
from fedspd.paper.records import Records, key_of, settings_of


@dataclass(frozen=True)
class ExperimentPlan:
    """The cells of an experiment that can run here, and why the others cannot."""

    experiment: PaperExperiment
    scale: ScaleName
    reading: ReadingName
    cells: list[Cell]
    missing: dict[str, str] = field(default_factory=dict)  # row -> sentence

    @property
    def name(self) -> str:
        return f"{self.experiment.name}.{self.scale}"

    @property
    def configs(self) -> list[ExperimentConfig]:
        return [config for cell in self.cells for config in cell.configs]


def make_plan(
    experiment: PaperExperiment, scale: ScaleName, reading: ReadingName, records: Records
) -> ExperimentPlan:
    """Return the cells to run; a row that stands in for another is there if that one cannot run.

    Data are needed only for runs that have no record yet.
    """
    missing: dict[str, str] = {}
    cells: list[Cell] = []
    for row in experiment.definition.rows:
        if row.stands_in_for is not None and row.stands_in_for not in missing:
            continue
        own = [experiment.cell(row, c, scale, reading) for c in experiment.definition.columns]
        todo = [c for cell in own for c in cell.configs if records.of(c) is None]
        sentence = next((found for c in todo if (found := missing_data(c))), None)
        if sentence:
            missing[row.name] = sentence
        else:
            cells += own
    return ExperimentPlan(experiment, scale, reading, cells, missing)


def missing_data(config: ExperimentConfig) -> str | None:
    """Return how to get the data of a config, if they are not there."""
    for name in (config.data.name, config.data.second):
        if name is None:
            continue
        if not is_official(name):
            load_source(name)  # refuses an unknown dataset in a sentence
        elif not is_present(name):
            return f"The dataset '{name}' is not here: 'fedspd data get {name}'."
    return None


def list_missing_jobs(plan: ExperimentPlan, records: Records) -> list[Job]:
    """Return a job for every run of the plan without a record, after a look at finished runs."""
    jobs = {name_of(config): Job(name_of(config), config, {}) for config in plan.configs}
    records.harvest(jobs, [job.config for job in jobs.values()])
    return [job for job in jobs.values() if records.of(job.config) is None]


def name_of(config: ExperimentConfig) -> str:
    """Return the name of the run folder."""
    words = [Path(config.data.name).stem, config.method, key_of(settings_of(config))]
    return "-".join(words).replace(":", ".").replace("/", "_")


def run_plan(
    plan: ExperimentPlan,
    records: Records,
    machine: Machine,
    device: str = "cpu",
    callbacks: Sequence[Callback] = (),
    wanted: Sequence[ExperimentConfig] = (),
) -> FedspdError | None:
    """Run what is missing and keep its records; return the error that ended it early, if any.

    wanted   the runs of all plans of the command, which share rounds; default: those of this plan
    """
    missing, wanted = list_missing_jobs(plan, records), wanted or plan.configs
    others = [Job(name_of(config), config, {}) for config in wanted]
    jobs, known = (
        [replace(j, config=j.config.model_copy(update={"device": device})) for j in part]
        for part in (missing, others)
    )
    error: FedspdError | None = None
    try:
        if jobs:
            run_jobs(jobs, records.out / "runs", machine, callbacks, known)
    except FedspdError as caught:
        error = caught
    finally:
        keep_records(plan, records, wanted)
    return error


def keep_records(
    plan: ExperimentPlan, records: Records, wanted: Sequence[ExperimentConfig]
) -> None:
    """Write the records of the plan, and drop checkpoints that no wanted run needs any more."""
    names = {name_of(config): config for config in plan.configs}
    records.harvest(names, names.values())
    readings: Sequence[ReadingName] = ("text", "code")
    cells = [cell for r in readings for cell in plan.experiment.cells(plan.scale, r)]
    records.write(plan.name, [config for cell in cells for config in cell.configs])
    needed = {rounds_key(config) for config in wanted if records.of(config) is None} - {None}
    for config in wanted:
        if records.of(config) is not None and rounds_key(config) not in needed:
            folder = records.out / "runs" / name_of(config)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def missing_error(plan: ExperimentPlan) -> DataError | None:
    """Return the error of an experiment that cannot run at all for lack of data."""
    if plan.cells:
        return None
    return DataError(f"{plan.experiment.name}: {' '.join(dict.fromkeys(plan.missing.values()))}")
