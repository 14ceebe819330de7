"""The list of the paper's experiments, with the hours of each on this machine."""

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table

from fedspd.cli.tables import fits_console, wide_console
from fedspd.config import ExperimentConfig
from fedspd.data.sources import is_official, is_present
from fedspd.paper import theory_report
from fedspd.paper.definition import (
    SCALES,
    PaperExperiment,
    ScaleName,
    experiment_names,
    load_experiment,
    without_labels,
)
from fedspd.paper.hours import hours_of
from fedspd.storage.atomic import Json

PLACES = re.compile(r"(?:Table|Figure|Section|Theorems) [\d.]*\d(?:, \d)*(?: and \d)?")
MISSING = "*"  # after the name of a dataset


def list_experiments(workers: int, as_json: bool) -> None:
    """Print every experiment, and the hours of all of them together."""
    experiments = [load_experiment(name) for name in experiment_names()]
    theory = {scale: theory_report.estimate_hours(scale) for scale in SCALES}
    runs = {own.name: {scale: _runs(own, scale) for scale in SCALES} for own in experiments}
    rows = [_describe(own, runs[own.name], workers) for own in experiments]
    rows.append(_describe_theory(theory))
    total = {
        scale: hours_of([c for own in runs.values() for c in own[scale]], workers) + theory[scale]
        for scale in SCALES
    }
    if as_json:
        print(json.dumps({"experiments": rows, "hours": total}))
        return
    console = wide_console(is_stderr=False)
    table = _wide_table(rows)
    if fits_console(console, table):
        console.print(table)
    else:
        _print_short(rows, console)
    for sentence in _explain(rows, total, workers):
        print(textwrap.fill(sentence, min(console.width, 100)))


# ---- what is known of an experiment


def _runs(experiment: PaperExperiment, scale: ScaleName) -> list[ExperimentConfig]:
    """Return the runs; rows that stand in for another count where the data of that are missing."""
    cells = experiment.cells(scale)
    absent = {cell.row.name for cell in cells if _absent(cell.configs[0])}
    replaced = absent & {cell.row.stands_in_for for cell in cells}
    return [
        config
        for cell in cells
        if cell.row.name not in replaced and cell.row.stands_in_for in {None, *replaced}
        for config in cell.configs
    ]


def _describe(
    experiment: PaperExperiment, runs: dict[ScaleName, list[ExperimentConfig]], workers: int
) -> Json:
    cells = [cell for cell in experiment.cells("paper") if cell.row.stands_in_for is None]
    configs = [config for cell in cells for config in cell.configs]
    return {
        "name": experiment.name,
        "title": experiment.definition.title,
        "source": _places(experiment.definition.source),
        "data": _distinct(name for config in configs for name in _datasets(config)),
        "clients": _distinct(config.clients for config in configs),
        "rounds": _distinct(config.rounds for config in configs),
        "methods": _distinct(config.method for config in configs),
        "needs": _distinct(name for config in configs for name in _absent(config)),
        "hours": {scale: hours_of(own, workers) for scale, own in runs.items()},
    }


def _describe_theory(hours: dict[ScaleName, float]) -> Json:
    about, sizes = theory_report.describe_theory(), theory_report.scale_of("paper")
    return {
        "name": theory_report.NAME,
        "title": about["title"],
        "source": _places(about["source"]),
        "data": ["two regressions", "a logistic one"],
        "clients": [str(sizes.clients)],
        "rounds": [str(sizes.rounds)],
        "methods": ["fedspd"],
        "needs": [],
        "hours": hours,
    }


def _absent(config: ExperimentConfig) -> list[str]:
    return [name for name in _datasets(config) if is_official(name) and not is_present(name)]


def _datasets(config: ExperimentConfig) -> list[str]:
    return [name for name in (config.data.name, config.data.second) if name is not None]


def _places(source: str) -> str:
    """Return the tables and figures that a source names before it says what they show."""
    named = without_labels(source).partition(":")[0]
    return ", ".join(PLACES.findall(named))


def _distinct(values: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(map(str, values)))


# ---- how it is shown


def _wide_table(rows: Sequence[Json]) -> Table:
    heads = ("experiment", "in the paper", "data", "clients", "rounds", "methods")
    table = Table(*heads, title="Experiments of the paper", title_justify="left", box=box.SIMPLE)
    for scale in SCALES:
        table.add_column(f"{scale} (h)", justify="right")
    for row in rows:
        lists = [", ".join(_marked(row)), *(", ".join(row[n]) for n in heads[3:])]
        table.add_row(row["name"], row["source"], *lists, *_hours(row["hours"]))
    return table


def _print_short(rows: Sequence[Json], console: Console) -> None:
    """Print two or three short lines for each experiment: names and hours, then its setting."""
    line = "{:<22}{:<28}{:>8}{:>8}{:>9}".format
    fill = partial(textwrap.fill, width=max(40, min(console.width, 100)), initial_indent="  ")
    console.print(
        line("experiment", "in the paper", *(f"{scale} h" for scale in SCALES)), style="bold"
    )
    for row in rows:
        print(line(row["name"], row["source"], *_hours(row["hours"])).rstrip())
        methods = row["methods"] if len(row["methods"]) < 4 else [f"{len(row['methods'])} methods"]
        setting = [
            ", ".join(_marked(row)),
            f"{_range(row['clients'])} clients",
            f"{_range(row['rounds'])} rounds",
            ", ".join(methods),
        ]
        print(fill("; ".join(setting), subsequent_indent="  "))


def _marked(row: Json) -> list[str]:
    return [f"{name}{MISSING}" if name in row["needs"] else name for name in row["data"]]


def _range(numbers: Sequence[str]) -> str:
    low, high = min(numbers, key=int), max(numbers, key=int)
    return low if low == high else f"{low} to {high}"


def _hours(hours: dict[ScaleName, float]) -> list[str]:
    return [format_hours(hours[scale]) for scale in SCALES]


def format_hours(hours: float) -> str:
    """Return the hours in tenths: below, starting up takes longer than training."""
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}" if hours >= 0.1 else "< 0.1"


def _explain(rows: Sequence[Json], total: dict[ScaleName, float], workers: int) -> list[str]:
    words = ", ".join(f"{format_hours(hours)} h at scale {s}" for s, hours in total.items())
    absent = dict.fromkeys(name for row in rows for name in row["needs"])
    needs = f"{MISSING} Not on this machine. Rows that stand in for it run instead; to get it: "
    commands = " and ".join(f"'fedspd data get {name}'" for name in absent)
    return [
        *([f"{needs}{commands}."] if absent else []),
        f"All together, with shared runs once: {words}. These are hours on {workers} cores like "
        "this one's, if nothing else runs, from the processor time of one gradient step.",
        "'fedspd paper show EXPERIMENT' says what the paper says and what is run.",
    ]
