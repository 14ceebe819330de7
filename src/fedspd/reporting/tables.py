"""A comparison table as Markdown and CSV."""

import csv
import io
from typing import Any

from fedspd.reporting.columns import Column, comparison_columns, is_best, point_cells
from fedspd.reporting.method_rows import Comparison, MethodRow
from fedspd.reporting.runs import Run
from fedspd.reporting.statistics import mean


def to_markdown(comparison: Comparison) -> str:
    """Return the table with the best values in bold, the meaning of its columns and all remarks."""
    columns = comparison_columns(comparison)
    names = [*comparison.shared_axes, "method"]
    head = [*names, *(column.title for column in columns)]
    alignment = ["---"] * len(names) + ["---:"] * len(columns)
    rows = [head, alignment]
    for row in comparison.rows:
        cells = [_markdown_cell(comparison, row, column) for column in columns]
        rows.append([*point_cells(comparison, row), row.name, *cells])
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    legend = [f"- {column.title}: {column.meaning}" for column in columns]
    return "\n".join(["# Comparison", "", *table, "", *legend, *_list_remarks(comparison)]) + "\n"


def _markdown_cell(comparison: Comparison, row: MethodRow, column: Column) -> str:
    text = column.text(row)
    return f"**{text}**" if is_best(comparison, row, column) else text


def _list_remarks(comparison: Comparison) -> list[str]:
    remarks = [*comparison.notes, *comparison.alarms]
    return ["", "## Remarks", "", *(f"- {remark}" for remark in remarks)] if remarks else []


def to_csv(comparison: Comparison) -> str:
    """Return one row per run."""
    text = io.StringIO()
    rows = [_csv_row(run, comparison.axes) for run in comparison.runs]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(run: Run, axes: list[str]) -> dict[str, Any]:
    result, newcomers = run.result, run.result.get("newcomers")
    distributions = result.get("distributions") or {}
    return {
        "method": run.method,
        "seed": run.seed,
        **{axis: run.point.get(axis) for axis in axes},
        "accuracy": result["accuracy"]["mean"],
        "std": result["accuracy"]["std"],
        "worst": result["accuracy"]["worst"],
        "lowest": result["accuracy"]["lowest"],
        "accuracy_before_final_phase": result["accuracy_before_final_phase"]["mean"],
        "test_loss": mean(result["clients"]["test_loss"]),
        "newcomers": newcomers["accuracy"]["mean"] if newcomers else None,
        "newcomers_test_loss": mean(newcomers["test_loss"]) if newcomers else None,
        "worst_distribution": distributions.get("worst"),
        "smallest_distribution": distributions.get("smallest"),
        "purity": result["purity"],
        "adjusted_rand_index": result.get("adjusted_rand_index"),
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
