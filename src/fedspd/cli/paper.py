"""The command paper: list, show and run the experiments of the FedSPD paper."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fedspd.cli.tables import wide_console
from fedspd.comparison.progress import ComparisonProgress
from fedspd.config import ExperimentConfig, as_toml
from fedspd.core.errors import ConfigError, FedspdError, nearest
from fedspd.paper import pages, theory_report
from fedspd.paper.definition import (
    READINGS,
    SCALES,
    PaperExperiment,
    ReadingName,
    ScaleName,
    experiment_names,
    load_experiment,
)
from fedspd.paper.hours import hours_of
from fedspd.paper.records import Records
from fedspd.paper.runs import (
    Plan,
    list_missing_jobs,
    make_plan,
    missing_data,
    missing_error,
    run_plan,
)
from fedspd.paper.table import PaperTable, make_table, to_json
from fedspd.storage.atomic import Json

ALL = "all"


def paper(
    words: list[str], scale: str, reading: str, out: Path, workers: int, as_json: bool
) -> int:
    """Run what the words say, and return the exit code."""
    chosen_scale, chosen_reading = _scale(scale), _reading(reading)
    match words:
        case []:
            _list([load_experiment(name) for name in experiment_names()], workers, as_json)
        case ["show", theory_report.NAME]:
            print(json.dumps(theory_report.describe_theory(), indent=1))
        case [theory_report.NAME]:
            _run_theory(chosen_scale, out, as_json)
        case ["show", name]:
            _show(load_experiment(name), chosen_scale, as_json)
        case [name]:
            if name == ALL:
                _run_theory(chosen_scale, out, as_json=False)
            names = experiment_names() if name == ALL else [name]
            return _run(names, chosen_scale, chosen_reading, out, workers, as_json)
        case _:
            raise ConfigError(
                f"{shlex.join(words)}: too many words; expected an experiment, 'show EXPERIMENT' "
                "or 'all'."
            )
    return 0


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


# ---- list


def _list(experiments: Sequence[PaperExperiment], workers: int, as_json: bool) -> None:
    rows = [_describe(experiment, workers) for experiment in experiments]
    if as_json:
        print(json.dumps(rows))
        return
    heads = ("experiment", "in the paper", "data", "clients", "rounds", "methods", "needs")
    table = Table(*heads, title="Experiments of the paper", title_justify="left", box=box.SIMPLE)
    for scale in SCALES:
        table.add_column(f"{scale} (h)", justify="right")
    for row in rows:
        hours = [_format_hours(row["hours"][scale]) for scale in SCALES]
        names = ("data", "clients", "rounds", "methods", "needs")
        table.add_row(row["name"], row["source"], *(", ".join(row[n]) for n in names), *hours)
    Console().print(table)
    total = {s: _format_hours(hours_of(_configs(experiments, s), workers)) for s in SCALES}
    words = ", ".join(f"{hours} h at scale {scale}" for scale, hours in total.items())
    print(
        f"Hours on {workers} cores of this machine, from the processor time of one gradient step. "
        f"All together, with shared runs once: {words}. 'theory' measures the theorems, in minutes "
        "at scale small."
    )


def _configs(experiments: Sequence[PaperExperiment], scale: ScaleName) -> list[ExperimentConfig]:
    return [c for e in experiments for cell in e.cells(scale) for c in cell.configs]


def _describe(experiment: PaperExperiment, workers: int) -> Json:
    cells = experiment.cells("paper")
    configs = [cell.configs[0] for cell in cells]
    missing = dict.fromkeys(filter(None, map(missing_data, configs)))
    return {
        "name": experiment.name,
        "title": experiment.definition.title,
        "source": experiment.definition.source.partition(":")[0],
        "data": list(dict.fromkeys(config.data.name for config in configs)),
        "clients": list(dict.fromkeys(str(config.clients) for config in configs)),
        "rounds": list(dict.fromkeys(str(config.rounds) for config in configs)),
        "methods": list(dict.fromkeys(config.method for config in configs)),
        "needs": [sentence.partition("'")[2].partition("'")[0] for sentence in missing],
        "hours": {scale: hours_of(_configs([experiment], scale), workers) for scale in SCALES},
    }


def _format_hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}" if hours >= 0.1 else f"{hours:.3f}"


# ---- show


def _show(experiment: PaperExperiment, scale: ScaleName, as_json: bool) -> None:
    own = experiment.definition
    if as_json:
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
            table.add_row(row, *(f"{value:g}" for value in values))
        console.print(table)
    first = experiment.cells(scale)[0]
    seeds = len(first.configs)
    print(f"Config at scale {scale} of '{first.row.name}', '{first.column.name}' ({seeds} seeds):")
    print(as_toml(first.configs[0]))


# ---- run


def _run_theory(scale: ScaleName, out: Path, as_json: bool) -> None:
    """Measure the theorems; they have no runs and no values of the paper to compare with."""

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    series = theory_report.run_theory(out, scale, progress)
    folder = theory_report.write_theory(out, scale, series)
    found = theory_report.findings(series)
    for sentence in found:
        print(sentence, file=sys.stderr if as_json else sys.stdout)
    print(f"Report: {folder / 'report.md'}", file=sys.stderr)
    if as_json:
        print(json.dumps({"findings": found, "report": str(folder / "report.md")}))


def _run(
    names: Sequence[str],
    scale: ScaleName,
    reading: ReadingName,
    out: Path,
    workers: int,
    as_json: bool,
) -> int:
    """Run the experiments one after another; one that fails does not end the others."""
    records = Records(out)
    errors: dict[str, FedspdError] = {}
    plans: list[Plan] = []
    for name in names:
        try:
            plans.append(make_plan(load_experiment(name), scale, reading, records))
        except FedspdError as error:
            errors[name] = error
    jobs = {job.name: job for plan in plans for job in list_missing_jobs(plan, records)}
    try:
        with ComparisonProgress(list(jobs.values()), as_json) as progress:
            for plan in plans:
                failure = run_plan(plan, records, workers, [progress])
                if failure is not None:
                    errors[plan.experiment.name] = failure
                _write(plan, records)
    except KeyboardInterrupt:
        print(f"\nfedspd: Continue with: {shlex.join(['fedspd', *sys.argv[1:]])}", file=sys.stderr)
        raise
    if len(names) == 1:
        _raise_only(errors, plans)
    tables = [_write(plan, records) for plan in plans]
    for table, folder in tables:
        _print_table(table, folder, as_json)
    _print_missing(plans, errors)
    if as_json:
        print(json.dumps({"tables": [to_json(t) for t, _ in tables], "missing": _missing(plans)}))
    return 1 if errors else 0


def _raise_only(errors: dict[str, FedspdError], plans: Sequence[Plan]) -> None:
    """Raise the error of the only experiment, also if it lacks the data of all its rows."""
    for error in [*errors.values(), *filter(None, map(missing_error, plans))]:
        raise error


def _write(plan: Plan, records: Records) -> tuple[PaperTable, Path]:
    table = make_table(plan.experiment, plan.scale, plan.reading, records, plan.missing)
    return table, pages.write_report(table, records)


def _print_table(table: PaperTable, folder: Path, as_json: bool) -> None:
    console = wide_console(is_stderr=as_json)
    title = f"{table.experiment.definition.title} ({table.experiment.definition.source})"
    shown = Table(*pages.HEAD, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for row in pages.value_rows(table):
        shown.add_row(*row)
    console.print(shown)
    for note in table.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Report: {folder / 'report.html'}", markup=False, soft_wrap=True)


def _missing(plans: Sequence[Plan]) -> dict[str, dict[str, str]]:
    return {plan.experiment.name: plan.missing for plan in plans if plan.missing}


def _print_missing(plans: Sequence[Plan], errors: dict[str, FedspdError]) -> None:
    """Say at the end what is missing, and how to get it."""
    for name, error in errors.items():
        print(f"fedspd: {name} is not complete: {error}", file=sys.stderr)
    for name, rows in _missing(plans).items():
        for sentence in dict.fromkeys(rows.values()):
            without = ", ".join(row for row in rows if rows[row] == sentence)
            print(f"fedspd: {name} has no row {without}. {sentence}", file=sys.stderr)
