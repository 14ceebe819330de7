"""The command paper: list, show and run the experiments of the FedSPD paper."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.table import Table

from fedspd.cli.paper_list import list_experiments
from fedspd.cli.tables import wide_console
from fedspd.comparison.progress import ComparisonProgress
from fedspd.comparison.scheduler import Machine
from fedspd.config import as_toml, validate
from fedspd.core.errors import ConfigError, FedspdError, nearest
from fedspd.core.machine import DEFAULT_WORKERS
from fedspd.core.scores import MISSING
from fedspd.engines import engine_factory
from fedspd.experiment.build import device_of
from fedspd.paper import pages, theory_report
from fedspd.paper.definition import (
    READINGS,
    SCALES,
    PaperExperiment,
    ReadingName,
    ScaleName,
    experiment_names,
    load_experiment,
    without_labels,
)
from fedspd.paper.hours import seconds_by_run
from fedspd.paper.records import Records, key_of, settings_of
from fedspd.paper.runs import (
    ExperimentPlan,
    list_missing_jobs,
    make_plan,
    missing_error,
    run_plan,
)
from fedspd.paper.table import PaperTable, make_table, to_json

ALL = "all"


@dataclass(frozen=True)
class Order:
    """How experiments are to be run, and where."""

    scale: ScaleName
    reading: ReadingName
    out: Path
    machine: Machine
    device: str
    as_json: bool


def paper(
    words: list[str],
    scale: str,
    reading: str,
    out: Path,
    machine: Machine,
    device: str,
    as_json: bool,
) -> int:
    """Run what the words say, and return the exit code."""
    order = Order(_scale(scale), _reading(reading), out, machine, device, as_json)
    device_of(validate({"device": device}))
    match words:
        case []:
            list_experiments(machine.workers or DEFAULT_WORKERS, as_json)
        case ["show"] | ["show", "all"]:
            raise ConfigError("show: no experiment; expected one, such as 'show table-dfl'.")
        case ["show", theory_report.NAME]:
            _show_theory(order)
        case ["show", name]:
            _show(load_experiment(name), order)
        case [name]:
            # one cluster for all runs, which find that they are in it
            with engine_factory(machine.engine, machine.workers, machine.address), _hint():
                return _run_named(name, order)
        case _:
            raise ConfigError(
                f"{shlex.join(words)}: too many words; expected an experiment, 'show EXPERIMENT' "
                "or 'all'."
            )
    return 0


@contextmanager
def _hint() -> Iterator[None]:
    """Say after Ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nfedspd: Continue with: {shlex.join(['fedspd', *sys.argv[1:]])}", file=sys.stderr)
        raise


def _run_named(name: str, order: Order) -> int:
    """Run one experiment, or the theory and then all others."""
    if name == theory_report.NAME:
        _run_theory(order)
        return 0
    if name == ALL:
        _run_theory(replace(order, as_json=False))
    return _run(experiment_names() if name == ALL else [name], order)


def _scale(name: str) -> ScaleName:
    for scale in SCALES:
        if scale == name:
            return scale
    raise ConfigError(f"--scale {name}: unknown scale; {nearest(name, SCALES)}")


def _reading(name: str) -> ReadingName:
    for reading in READINGS:
        if reading == name:
            return reading
    raise ConfigError(f"--reading {name}: unknown reading; {nearest(name, READINGS)}")


# ---- show


def _show(experiment: PaperExperiment, order: Order) -> None:
    own = experiment.definition
    if order.as_json:
        print(json.dumps({"name": experiment.name, **own.model_dump()}))
        return
    console = wide_console(is_stderr=False)
    console.print(own.title, style="bold", markup=False)
    print(f"{own.source}\nThe paper says: {own.says}")
    for note in own.leaves_open:
        print(f"Left open: {note}")
    if own.values:
        table = Table(
            "", *(c.name for c in own.columns), title="The paper's values", box=box.SIMPLE
        )
        for row, values in own.values.items():
            table.add_row(row, *(MISSING if v is None else f"{v:.2f}" for v in values))
        console.print(table)
    first = experiment.cells(order.scale, order.reading)[0]
    where = f"'{first.row.name}', '{first.column.name}'"
    print(f"Config at scale {order.scale} of {where}; seeds: {len(first.configs)}")
    print(as_toml(first.configs[0]))


def _show_theory(order: Order) -> None:
    about = theory_report.describe_theory()
    if order.as_json:
        print(json.dumps(about))
        return
    wide_console(is_stderr=False).print(about["title"], style="bold", markup=False)
    print(f"{about['source']}\nThe paper says: {about['says']}")
    for note in about["leaves_open"]:
        print(f"Left open: {note}")
    sizes = "\n".join(f"{key} = {value}" for key, value in about[order.scale].items())
    print(f"Sizes at scale {order.scale}:\n{sizes}")


# ---- run


def _run_theory(order: Order) -> None:
    """Measure the theorems; they have no runs and no values of the paper to compare with."""

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    series = theory_report.run_theory(order.out, order.scale, progress)
    folder = theory_report.write_theory(order.out, order.scale, series)
    found = theory_report.findings(series)
    for sentence in found:
        print(sentence, file=sys.stderr if order.as_json else sys.stdout)
    print(f"Report: {folder / 'report.html'}", file=sys.stderr)
    if order.as_json:
        print(json.dumps({"findings": found, "report": str(folder / "report.html")}))


def _run(names: Sequence[str], order: Order) -> int:
    """Run the experiments one after another; one that fails does not end the others."""
    records = Records(order.out)
    errors: dict[str, FedspdError] = {}
    plans: list[ExperimentPlan] = []
    for name in names:
        try:
            plans.append(make_plan(load_experiment(name), order.scale, order.reading, records))
        except FedspdError as error:
            errors[name] = error
    wanted = [config for plan in plans for config in plan.configs]
    jobs = {job.name: job for plan in plans for job in list_missing_jobs(plan, records)}
    seconds = seconds_by_run(job.config for job in jobs.values())
    seconds_of = lambda config: seconds[key_of(settings_of(config))]  # noqa: E731
    with ComparisonProgress(list(jobs.values()), order.as_json, seconds_of) as progress:
        for plan in plans:
            failure = run_plan(plan, records, order.machine, order.device, [progress], wanted)
            if failure is not None:
                errors[plan.experiment.name] = failure
            _write(plan, records)
    if len(names) == 1:
        _raise_only(errors, plans)
    tables = [_write(plan, records) for plan in plans]
    for table, folder in tables:
        _print_table(table, folder, order.as_json)
    _print_missing(plans, errors)
    if order.as_json:
        print(json.dumps({"tables": [to_json(t) for t, _ in tables], "missing": _missing(plans)}))
    return 1 if errors else 0


def _raise_only(errors: dict[str, FedspdError], plans: Sequence[ExperimentPlan]) -> None:
    """Raise the error of the only experiment, also if it lacks the data of all its rows."""
    for error in [*errors.values(), *filter(None, map(missing_error, plans))]:
        raise error


def _write(plan: ExperimentPlan, records: Records) -> tuple[PaperTable, Path]:
    table = make_table(plan.experiment, plan.scale, plan.reading, records, plan.missing)
    return table, pages.write_report(table, records)


def _print_table(table: PaperTable, folder: Path, as_json: bool) -> None:
    console = wide_console(is_stderr=as_json)
    own = table.experiment.definition
    title = f"{own.title} ({without_labels(own.source)})"
    shown = Table(*pages.HEAD, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for row in pages.value_rows(table):
        shown.add_row(*row)
    console.print(shown)
    for note in table.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Report: {folder / 'report.html'}", markup=False, soft_wrap=True)


def _missing(plans: Sequence[ExperimentPlan]) -> dict[str, dict[str, str]]:
    return {plan.experiment.name: plan.missing for plan in plans if plan.missing}


def _print_missing(plans: Sequence[ExperimentPlan], errors: dict[str, FedspdError]) -> None:
    """Say at the end what is missing, and how to get it."""
    for name, error in errors.items():
        print(f"fedspd: {name} is not complete: {error}", file=sys.stderr)
    for name, rows in _missing(plans).items():
        for sentence in dict.fromkeys(rows.values()):
            without = ", ".join(row for row in rows if rows[row] == sentence)
            print(f"fedspd: {name} has no row {without}. {sentence}", file=sys.stderr)
