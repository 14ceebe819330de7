"""A comparison as Markdown, LaTeX and CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from fedspd.core.scores import OTHER_SCORES, RMSE
from fedspd.reporting.columns import (
    Column,
    comparison_columns,
    describe_target,
    format_percent,
    is_best,
    point_cells,
    target_columns,
)
from fedspd.reporting.method_rows import Comparison, MethodRow, mean_score
from fedspd.reporting.runs import Run
from fedspd.reporting.statistics import mean
from fedspd.storage.history import costs, reach


def to_markdown(comparison: Comparison, advice: str | None = None) -> str:
    """Return the advice, the tables with the best values in bold, their legend and remarks."""
    columns = comparison_columns(comparison)
    legend = [f"- {column.title}: {column.meaning}" for column in columns]
    advised = [f"Advice: {advice}", ""] if advice else []
    lines = ["# Comparison", "", *advised, *_markdown_table(comparison, columns), "", *legend]
    if reached := target_columns(comparison):
        title = f"## Cost to target: {describe_target(comparison)}"
        lines += ["", title, "", *_markdown_table(comparison, reached)]
    if names := class_names(comparison):
        lines += ["", "## Accuracy by class (%)", "", *_markdown_classes(comparison, names)]
    return "\n".join([*lines, *_list_remarks(comparison)]) + "\n"


def class_names(comparison: Comparison) -> list[str]:
    """Return the names of all classes; none in a regression."""
    return list(dict.fromkeys(name for row in comparison.rows for name in row.classes))


def _markdown_table(comparison: Comparison, columns: Sequence[Column]) -> list[str]:
    head = [*comparison.shared_axes, "method", *(column.title for column in columns)]
    rows = []
    for row in comparison.rows:
        cells = [_markdown_cell(comparison, row, column) for column in columns]
        rows.append([*point_cells(comparison, row), row.name, *cells])
    return markdown_table(head, rows, len(columns))


def _markdown_classes(comparison: Comparison, names: Sequence[str]) -> list[str]:
    found = [row.classes for row in comparison.rows]
    rows = [[name, *(format_percent(each.get(name)) for each in found)] for name in names]
    return markdown_table(["class", *(row.label for row in comparison.rows)], rows, len(found))


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0
) -> list[str]:
    """Return the lines of a table, whose last columns are numbers."""
    rule = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    lines = [head, rule, *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines]


def _markdown_cell(comparison: Comparison, row: MethodRow, column: Column) -> str:
    text = column.text(row)
    return f"**{text}**" if is_best(comparison, row, column) else text


def _list_remarks(comparison: Comparison) -> list[str]:
    remarks = [*comparison.notes, *comparison.alarms]
    return ["", "## Remarks", "", *(f"- {remark}" for remark in remarks)] if remarks else []


def to_latex(comparison: Comparison) -> str:
    """Return the columns that a paper has room for; it needs the package booktabs."""
    columns = [column for column in comparison_columns(comparison) if column.is_brief]
    names = [*comparison.shared_axes, "method"]
    rows = [
        [*map(_latex, [*point_cells(comparison, row), row.name])]
        + [_latex_cell(comparison, row, column) for column in columns]
        for row in comparison.rows
    ]
    head = [*names, *(column.title for column in columns)]
    return _latex_tabular("l" * len(names) + "r" * len(columns), [*map(_latex, head)], rows)


def _latex_cell(comparison: Comparison, row: MethodRow, column: Column) -> str:
    text = _latex(column.text(row))
    return rf"\textbf{{{text}}}" if is_best(comparison, row, column) else text


def latex_table(columns: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a tabular environment with these texts."""
    return _latex_tabular(columns, [*map(_latex, head)], [[*map(_latex, row)] for row in rows])


def _latex_tabular(columns: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top, *body = [" & ".join(cells) + r" \\" for cells in (head, *rows)]
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", top, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex(text: str) -> str:
    names = {"±": r"$\pm$", "\N{MINUS SIGN}": "$-$", "×": r"$\times$", "–": "--"}
    names |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    names |= {special: f"\\{special}" for special in "%&_#${}"}
    return "".join(names.get(letter, letter) for letter in text)


def to_csv(comparison: Comparison) -> str:
    """Return one row per run."""
    return csv_table([_csv_row(run, comparison) for run in comparison.runs])


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same fields, below the names of these."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(run: Run, comparison: Comparison) -> dict[str, Any]:
    result, newcomers = run.result, run.result.get("newcomers")
    distributions = result.get("distributions") or {}
    return {
        "method": run.method,
        "seed": run.seed,
        **{axis: run.point.get(axis) for axis in comparison.axes},
        "accuracy": result["accuracy"]["mean"],
        "std": result["accuracy"]["std"],
        "worst": result["accuracy"]["worst"],
        "lowest": result["accuracy"]["lowest"],
        "accuracy_before_final_phase": result["accuracy_before_final_phase"]["mean"],
        **_csv_metrics(run),
        "test_loss": mean(result["clients"]["test_loss"]),
        "newcomers": mean_score(newcomers, "accuracy") if newcomers else None,
        "newcomers_test_loss": mean(newcomers["test_loss"]) if newcomers else None,
        "worst_distribution": distributions.get("worst"),
        "smallest_distribution": distributions.get("smallest"),
        "clusters_found": result.get("clusters"),
        "purity": result["purity"],
        "adjusted_rand_index": result.get("adjusted_rand_index"),
        "bytes_multicast": result["bytes"]["multicast"],
        "bytes_point_to_point": result["bytes"]["point_to_point"],
        "models_sent": result["models_sent"],
        "steps": result["steps"],
        "seconds": result["seconds"],
        **_csv_target(run, comparison),
        "rounds": result["rounds"],
        "data_hash": run.partition["hash"],
        "hash": result["hash"],
        "folder": str(run.folder),
    }


def _csv_metrics(run: Run) -> dict[str, float | None]:
    """Return the mean of every other score, and of the RMSE its spread and that of newcomers."""
    found = {score.name: run.spread(score.name).get("mean") for score in (RMSE, *OTHER_SCORES)}
    spread, newcomers = run.spread(RMSE.name), run.result.get("newcomers") or {}
    if spread:
        found |= {f"rmse_{name}": spread[name] for name in ("std", "worst", "lowest")}
        found["rmse_newcomers"] = mean_score(newcomers, RMSE.name)
    return found


def _csv_target(run: Run, comparison: Comparison) -> dict[str, float | None]:
    if comparison.target is None:
        return {}
    cost = costs(reach(run.history, comparison.target))
    return {"target": comparison.target, **{f"{name}_to_target": n for name, n in cost.items()}}
