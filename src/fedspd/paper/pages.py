"""Write the report of an experiment: Markdown, CSV, LaTeX, HTML, JSON and figures."""

import csv
import io
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

from fedspd.paper.drawing import draw_figures
from fedspd.paper.records import Records
from fedspd.paper.table import PaperTable, to_json
from fedspd.reporting.html import render_figure
from fedspd.reporting.run_figures import save_figures
from fedspd.reporting.style import STYLE
from fedspd.reporting.tables import latex_table
from fedspd.storage.atomic import Json, disk_errors
from fedspd.storage.run_folder import RunFolder

HEAD = ("", "", "seeds", "paper", "ours", "difference", "verdict")
GAP_HEAD = ("", "", "paper", "ours", "verdict")
LEGEND = (
    "Ours is the mean over seeds of the mean over clients, ± its 95 % confidence interval where "
    "there are several seeds. It agrees if the paper's value is within that interval, or within "
    "one point."
)


def write_report(table: PaperTable, records: Records) -> Path:
    """Write all files of the report and return their folder."""
    folder = records.out / "reports" / f"{table.experiment.name}.{table.scale}"
    if table.reading != "text":
        folder = folder.with_name(f"{folder.name}.{table.reading}")
    figures = draw_figures(table.experiment, table.scale, table.reading, records)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    save_figures(figures, folder / "figures")
    report = RunFolder(folder)
    report.write("report.md", f"# {table.experiment.definition.title}\n\n{to_markdown(table)}")
    report.write("report.csv", to_csv(table))
    report.write("report.tex", to_latex(table))
    report.write("report.json", to_json(table))
    report.write("report.html", to_html(table, figures))
    return folder


def value_rows(table: PaperTable) -> list[list[str]]:
    """Return the cells of the main table as text.

    A row that has neither run nor a number in the paper is one line.
    """
    lines: list[list[str]] = []
    for name, group in groupby(table.cells, lambda cell: cell.row.name):
        cells = list(group)
        if len(cells) > 1 and not any(cell.seeds or cell.paper is not None for cell in cells):
            runs = f"0 of {sum(cell.planned for cell in cells)}"
            lines.append([name, f"{len(cells)} values", runs, *cells[0].texts])
            continue
        lines += [
            [name, cell.column.name, f"{cell.seeds} of {cell.planned}", *cell.texts]
            for cell in cells
        ]
    return lines


def gap_rows(table: PaperTable) -> list[list[str]]:
    """Return the cells of the table of gaps as text."""
    return [[gap.row.name, gap.column.name, *gap.texts] for gap in table.gaps]


def lead(table: PaperTable) -> list[str]:
    """Return what the paper says, and under which settings our numbers are made."""
    own = table.experiment.definition
    measures = dict.fromkeys(cell.measure.title for cell in table.cells)
    unit = "; ratios to the first column" if own.relative else ""
    return [
        f"{own.source}. {own.says}",
        f"Shown: {', '.join(measures)}{unit}. Scale {table.scale}, reading '{table.reading}'.",
    ]


# ---- Markdown


def to_markdown(table: PaperTable) -> str:
    """Return the tables and notes, without a heading."""
    parts = [*lead(table), markdown_table(HEAD, value_rows(table))]
    if table.gaps:
        reference = table.experiment.definition.columns[0].name
        parts += [
            f"Difference to {reference} in points, paired by seed:",
            markdown_table(GAP_HEAD, gap_rows(table)),
        ]
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    return "\n\n".join(parts) + "\n"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---- CSV and LaTeX


def to_csv(table: PaperTable) -> str:
    """Return a line for every value."""
    return csv_lines(to_json(table)["cells"])


def csv_lines(cells: Sequence[Json]) -> str:
    """Return a line for each of these objects with the same fields."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(cells[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    return text.getvalue()


def to_latex(table: PaperTable) -> str:
    """Return the main table for a paper; it needs the package booktabs."""
    return latex_table("lllrrrl", HEAD, value_rows(table))


# ---- HTML


def to_html(table: PaperTable, figures: Mapping[str, Figure]) -> str:
    """Return one page without scripts or network access."""
    own = table.experiment.definition
    captions = {spec.name: spec.caption for spec in own.figures}
    body = [
        *(f"<p class=lead>{escape(sentence)}</p>" for sentence in lead(table)),
        html_table(HEAD, value_rows(table)),
        f"<p class=note>{escape(LEGEND)}</p>",
    ]
    if table.gaps:
        body += [
            f"<h2>Difference to {escape(own.columns[0].name)} in points, paired by seed</h2>",
            html_table(GAP_HEAD, gap_rows(table)),
        ]
    body += [html_figures(figures, captions), _html_list(table.notes)]
    return html_page(own.title, body, own.leaves_open)


def html_page(title: str, body: Sequence[str], leaves_open: Sequence[str]) -> str:
    """Return the page with this body, which ends with what the paper leaves open."""
    head, content = escape(title), "\n".join(body)
    choices = f"<h2>What the paper leaves open, and our choice</h2>\n{_html_list(leaves_open)}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{head}</title>"
        f"<style>{STYLE}</style><main><h1>{head}</h1>\n{content}\n{choices}</main></html>\n"
    )


def html_figures(figures: Mapping[str, Figure], captions: Mapping[str, str]) -> str:
    """Return the figures with their captions."""
    drawn = [render_figure(name, figure, captions[name]) for name, figure in figures.items()]
    return f"<div class=figures>{''.join(drawn)}</div>"


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of HTML."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<div class=wide><table><thead><tr>{heads}</tr></thead><tbody>\n{lines}</tbody></table>"
        "</div>"
    )


def _html_list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
