"""The numbers of a comparison as tables: on a terminal, as Markdown and as CSV."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from fedspd.reporting.runs import Run, canonical, mean
from fedspd.reporting.statistics import Comparison, Interval, MethodRow
from fedspd.storage.atomic import Json

MINUS, MISSING = "\N{MINUS SIGN}", "–"


@dataclass(frozen=True)
class Column:
    """What a table shows of a row; `best` is max or min where one value is better than another."""

    title: str
    meaning: str
    text: Callable[[MethodRow], str]
    number: Callable[[MethodRow], float | None]
    best: Callable[[Sequence[float]], float] | None = None
    in_terminal: bool = True  # which is narrow


def percent(part: float | None) -> str:
    return MISSING if part is None else f"{100 * part:.1f}"


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f}"


def with_interval(score: Interval) -> str:
    return percent(score.mean) + ("" if score.half is None else f" ± {100 * score.half:.1f}")


def signed(difference: Interval | None) -> str:
    if difference is None or difference.mean is None:
        return MISSING
    sign = "+" if difference.mean >= 0 else MINUS
    return f"{sign}{abs(100 * difference.mean):.1f}" + (
        "" if difference.half is None else f" ± {100 * difference.half:.1f}"
    )


def _steps(row: MethodRow) -> str:
    more = row.steps_ratio is not None and row.steps_ratio > 1.005
    return f"{row.steps:,.0f}" + (f" (×{row.steps_ratio:.2g})" if more else "")


def loss(mean: float | None) -> str:
    return MISSING if mean is None else f"{mean:.3g}"


def in_words(clients: Json) -> str:
    right = clients["accuracy"]["mean"]
    return (
        f"a test loss of {loss(mean(clients['test_loss']))}"
        if right is None
        else f"an accuracy of {percent(right)} %"
    )


COLUMNS = [
    Column(
        "seeds",
        "independent repetitions",
        lambda row: str(len(row.seeds)),
        lambda row: len(row.seeds),
    ),
    Column(
        "accuracy %",
        "test accuracy: mean over clients, then over seeds, ± its 95 % interval (Student's t over seeds)",
        lambda row: with_interval(row.accuracy),
        lambda row: row.accuracy.mean,
        max,
    ),
    Column(
        "against fedspd",
        "difference in accuracy to FedSPD in percentage points, paired by seed, ± its 95 % interval",
        lambda row: signed(row.difference),
        lambda row: row.difference.mean if row.difference else None,
    ),
    Column(
        "spread",
        "standard deviation of the accuracy over clients",
        lambda row: percent(row.spread),
        lambda row: row.spread,
        min,
        in_terminal=False,
    ),
    Column(
        "worst tenth",
        "mean accuracy of the worst tenth of the clients",
        lambda row: percent(row.worst),
        lambda row: row.worst,
        max,
    ),
    Column(
        "before final",
        "accuracy before the final phase",
        lambda row: with_interval(row.before),
        lambda row: row.before.mean,
        max,
        in_terminal=False,
    ),
    Column(
        "test loss",
        "mean over clients, then over seeds",
        lambda row: loss(row.test_loss.mean),
        lambda row: row.test_loss.mean,
        min,
        in_terminal=False,
    ),
    Column(
        "purity",
        "share of the examples in the cluster that stands for their true distribution; with two distributions 0.5 is chance",
        lambda row: MISSING if row.purity is None else f"{row.purity:.2f}",
        lambda row: row.purity,
        max,
        in_terminal=False,
    ),
    Column(
        "newcomers",
        "accuracy of the clients that took no part in training and joined after it",
        lambda row: with_interval(row.newcomers),
        lambda row: row.newcomers.mean,
        max,
    ),
    Column(
        "newcomers' loss",
        "test loss of the clients that joined after training",
        lambda row: loss(row.newcomers_loss.mean),
        lambda row: row.newcomers_loss.mean,
        min,
        in_terminal=False,
    ),
    Column(
        "MB multicast",
        "megabytes sent if one sending reaches all neighbours",
        lambda row: megabytes(row.multicast),
        lambda row: row.multicast,
        min,
        in_terminal=False,
    ),
    Column(
        "MB one-to-one",
        "megabytes sent if every neighbour gets its own copy",
        lambda row: megabytes(row.point_to_point),
        lambda row: row.point_to_point,
        min,
    ),
    Column(
        "models",
        "models sent, one-to-one",
        lambda row: f"{row.models:,.0f}",
        lambda row: row.models,
        min,
        in_terminal=False,
    ),
    Column(
        "steps",
        "gradient steps of all clients; × FedAvg's, where there are more",
        _steps,
        lambda row: row.steps,
        min,
    ),
    Column(
        "s",
        "seconds of all rounds and the final phase, tests not counted; runs side by side slow each other down",
        lambda row: f"{row.seconds:,.1f}",
        lambda row: row.seconds,
        min,
    ),
]


def columns(comparison: Comparison) -> list[Column]:
    """Those in which there is something to see."""
    return [
        column
        for column in COLUMNS
        if any(column.number(row) is not None for row in comparison.rows)
    ]


def marked(comparison: Comparison, row: MethodRow, column: Column) -> bool:
    """Whether it is the best of all that stand at the same point, whatever their own options; where all are alike, none is."""
    if column.best is None:
        return False
    peers = [
        column.number(other)
        for other in comparison.rows
        if canonical(other.shared_point) == canonical(row.shared_point)
    ]
    known, own = [number for number in peers if number is not None], column.number(row)
    return own is not None and not alike(min(known), max(known)) and alike(own, column.best(known))


def alike(one: float, other: float) -> bool:
    """Records have nine digits: sums of the same numbers in another order may differ in the last one."""
    return math.isclose(one, other, rel_tol=1e-7, abs_tol=1e-9)


def places(comparison: Comparison, row: MethodRow) -> list[str]:
    return [str(row.point.get(axis, MISSING)) for axis in comparison.axes]


def terminal(comparison: Comparison, fits: Callable[[Table], bool]) -> Table:
    """As many columns as fit, but the accuracy at least, or the loss of a regression; the report has all of them."""
    score = "accuracy" if any(row.accuracy.mean is not None for row in comparison.rows) else "loss"
    kept = [
        column
        for column in columns(comparison)
        if column.in_terminal or column.title in (f"test {score}", f"newcomers' {score}")
    ]
    tables = (_terminal(comparison, kept[:count], score) for count in range(len(kept), 1, -1))
    return next((table for table in tables if fits(table)), _terminal(comparison, kept[:2], score))


def _terminal(comparison: Comparison, kept: list[Column], score: str) -> Table:
    shown = Table(
        title=f"Test {score}, and what it cost",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    for title in [*comparison.axes, "method"]:
        shown.add_column(title.rpartition(".")[2], no_wrap=True)
    for column in kept:
        shown.add_column(column.title, justify="right", no_wrap=True)
    for row in comparison.rows:
        cells = [
            f"[bold]{c.text(row)}[/]" if marked(comparison, row, c) else c.text(row) for c in kept
        ]
        shown.add_row(*map(escape, [*places(comparison, row), row.method]), *cells)
    return shown


def markdown(comparison: Comparison) -> str:
    kept = columns(comparison)
    head = [*comparison.axes, "method", *(column.title for column in kept)]
    left = len(comparison.axes) + 1
    rows = [head, ["---"] * left + ["---:"] * len(kept)]
    for row in comparison.rows:
        cells = [f"**{c.text(row)}**" if marked(comparison, row, c) else c.text(row) for c in kept]
        rows.append([*places(comparison, row), row.method, *cells])
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    legend = [f"- {column.title}: {column.meaning}" for column in kept]
    return "\n".join(["# Comparison", "", *table, "", *legend, *_remarks(comparison)]) + "\n"


def _remarks(comparison: Comparison) -> list[str]:
    remarks = [*comparison.notes, *comparison.alarms]
    return ["", "## Remarks", "", *(f"- {remark}" for remark in remarks)] if remarks else []


def as_csv(comparison: Comparison) -> str:
    """One row per run."""
    text = io.StringIO()
    rows = [_numbers(run, comparison.axes) for run in comparison.runs]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _numbers(run: Run, axes: list[str]) -> dict[str, Any]:
    result, joined = run.result, run.result.get("newcomers")
    return {
        "method": run.method,
        "seed": run.seed,
        **{axis: run.point.get(axis) for axis in axes},
        "accuracy": result["accuracy"]["mean"],
        "spread": result["accuracy"]["std"],
        "worst_tenth": result["accuracy"]["worst"],
        "lowest": result["accuracy"]["lowest"],
        "accuracy_before_final_phase": result["accuracy_before_final_phase"]["mean"],
        "test_loss": mean(result["clients"]["test_loss"]),
        "newcomers": joined["accuracy"]["mean"] if joined else None,
        "newcomers_test_loss": mean(joined["test_loss"]) if joined else None,
        "purity": result["purity"],
        "bytes_multicast": result["bytes"]["multicast"],
        "bytes_point_to_point": result["bytes"]["point_to_point"],
        "models_sent": result["models_sent"],
        "steps": result["steps"],
        "seconds": result["seconds"],
        "rounds": result["rounds"],
        "data_hash": run.partition["hash"],
        "hash": result["hash"],
        "folder": str(run.folder),
    }
