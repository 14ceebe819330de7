"""Write the report of runs: report.html, .md, .tex, .csv and .json, and figures/."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fedspd.reporting import html, run_figures, tables
from fedspd.reporting.method_rows import Comparison, MethodRow, compare_runs
from fedspd.reporting.runs import read_reference, read_runs
from fedspd.reporting.selection import select_comparable
from fedspd.storage.atomic import Json, disk_errors
from fedspd.storage.run_folder import RunFolder


def write_report(
    folders: Sequence[Path], out: Path, reference: str, target: float | None = None
) -> Comparison:
    """Write the report of the comparable finished runs in these folders into `out`."""
    comparison = read_comparison(folders, reference, target)
    write_pages(comparison, out)
    return comparison


def write_pages(comparison: Comparison, out: Path, advice: str | None = None) -> None:
    """Write the documents and figures of a comparison into `out`."""
    figures = run_figures.draw_comparison(comparison)
    figures_by_point = run_figures.draw_points(comparison)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    run_figures.save_figures(figures, out / "figures")
    folder = RunFolder(out)
    folder.write("report.md", tables.to_markdown(comparison, advice))
    folder.write("report.tex", tables.to_latex(comparison))
    folder.write("report.csv", tables.to_csv(comparison))
    folder.write("report.json", to_json(comparison))
    folder.write("report.html", html.render_page(comparison, figures, figures_by_point, advice))


def read_comparison(
    folders: Sequence[Path], reference: str, target: float | None = None
) -> Comparison:
    """Return the comparison of the comparable finished runs in these folders.

    All methods are compared with the reference method of the first comparison folder; `reference`
    is that of runs without one. `target` is a score, of which the report shows what it costs.
    """
    runs, unfinished_notes = read_runs(folders)
    selected, other_notes = select_comparable(runs)
    reference = read_reference(folders) or reference
    return compare_runs(selected, reference, unfinished_notes + other_notes, target)


def to_json(comparison: Comparison) -> Json:
    """Return all statistics of the comparison, and which runs they come from."""
    runs = [
        {"folder": str(run.folder), "method": run.method, "seed": run.seed, "point": run.point}
        for run in comparison.runs
    ]
    document = {
        "reference": comparison.reference,
        "axes": comparison.axes,
        "score": comparison.score.name,
        "target": comparison.target,
        "rows": [_row_json(row, comparison.score.name) for row in comparison.rows],
        "notes": comparison.notes,
        "alarms": comparison.alarms,
        "runs": runs,
    }
    plain: Json = json.loads(json.dumps(document))
    return plain


def _row_json(row: MethodRow, score: str) -> Json:
    """Return a row with its score under the score's name."""
    fields = asdict(row)
    curve = fields["curve"]
    fields[score], curve[score] = fields.pop("score"), curve.pop("score")
    return {"name": row.name, **fields}
