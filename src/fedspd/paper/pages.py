"""Write the report of an experiment: Markdown, CSV, LaTeX, HTML, JSON and figures."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

from fedspd.core.scores import MISSING
from fedspd.paper.definition import without_labels
from fedspd.paper.drawing import draw_figures
from fedspd.paper.records import Records
from fedspd.paper.table import Gap, PaperTable, TableCell, to_json
from fedspd.reporting.html import render_document, render_figure, render_list, render_table
from fedspd.reporting.run_figures import save_figures
from fedspd.reporting.tables import csv_table, latex_table, markdown_table
from fedspd.storage.atomic import disk_errors
from fedspd.storage.run_folder import RunFolder

HEAD = ("", "", "seeds", "paper", "ours", "difference", "verdict")
LEGEND = (
    "Ours is the mean over seeds of the mean over clients, ± its 95 % confidence interval where "
    "there are several seeds; one seed has none, and another seed may differ by some points. It "
    "agrees if the paper's value is within one point; further away, it is undecided if the value "
    "is within that interval. 'vs' is the difference to another column in points, paired by seed: "
    "on the same side as in the paper, or on the opposite one. The reading 'text' follows the "
    "paper's text, 'code' its published code."
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
    own = table.experiment.definition
    about = f"# {own.title}\n\n{describe_source(own.source, own.says)}\n\n"
    report.write("report.md", about + to_markdown(table))
    report.write("report.csv", to_csv(table))
    report.write("report.tex", to_latex(table))
    report.write("report.json", to_json(table))
    report.write("report.html", to_html(table, figures))
    return folder


def describe_source(source: str, says: str) -> str:
    """Return where the paper has a table or figure, and what it concludes: we may not agree."""
    return f"{without_labels(source)}. The paper says: {says}"


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


# ---- the paper's arrangement


def arranged_head(table: PaperTable) -> list[str]:
    """Return the head of the table as the paper arranges it."""
    return ["", "", *(column.name for column in table.experiment.definition.columns)]


def arranged_rows(table: PaperTable) -> list[list[str]]:
    """Return for each row its lines over the columns: the paper, ours, differences, verdicts."""
    reference = table.experiment.definition.columns[0].name
    lines: list[list[str]] = []
    for name, group in groupby(table.cells, lambda cell: cell.row.name):
        gaps = [gap for gap in table.gaps if gap.row.name == name]
        own = [*_value_lines(list(group)), *_gap_lines(gaps, reference)]
        lines += [["" if i else name, *line] for i, line in enumerate(own)]
    return lines


def _value_lines(cells: Sequence[TableCell]) -> list[list[str]]:
    paper, ours, difference, verdicts = zip(*(cell.texts for cell in cells), strict=True)
    has_paper = any(cell.paper is not None for cell in cells)
    ran = [cell for cell in cells if cell.seeds]
    if not ran:
        return [[f"paper ({verdicts[0]})" if has_paper else verdicts[0], *paper]]
    own = [f"ours, {_seeds(ran)}", *ours]
    if not has_paper:
        return [own]
    if cells[0].other_data:
        return [[f"paper, {cells[0].other_data} (not comparable)", *paper], own]
    compared = [cell.difference is not None for cell in cells]
    verdict = _verdict_line(verdicts, compared)
    return [["paper", *paper], own, ["difference", *difference], verdict]


def _seeds(ran: Sequence[TableCell]) -> str:
    low, high = min(cell.seeds for cell in ran), max(cell.seeds for cell in ran)
    planned = ran[0].planned
    count = str(low) if low == high else f"{low} to {high}"
    of = "" if low == planned else f" of {planned}"
    return f"{count}{of} seed{'' if planned == 1 else 's'}"


def _gap_lines(gaps: Sequence[Gap], reference: str) -> list[list[str]]:
    """Return the lines of the gaps to the first column, if the paper has some of ours."""
    compared = [gap.paper is not None and gap.ours.mean is not None for gap in gaps]
    if not any(compared):
        return []
    paper, ours, verdicts = zip(*(gap.texts for gap in gaps), strict=True)
    of_paper = [f"vs {reference}, paper", "", *paper]
    of_ours = [f"vs {reference}, ours", "", *ours]
    return [of_paper, of_ours, _verdict_line(["", *verdicts], [False, *compared])]


def _verdict_line(verdicts: Sequence[str], compared: Sequence[bool]) -> list[str]:
    """Return the verdicts; what they all say beside the verdict itself is said once."""
    parts = [re.split(", |: ", verdict, maxsplit=1) for verdict in verdicts]
    shown = [part for part, is_shown in zip(parts, compared, strict=True) if is_shown]
    rest = {tuple(part[1:]) for part in shown}
    is_common = len(rest) == 1
    texts = [part[0] for part in parts] if is_common else list(verdicts)
    marked = zip(texts, compared, strict=True)
    return [
        ", ".join(["verdict", *(rest.pop() if is_common else ())]),
        *(text if is_shown else text and MISSING for text, is_shown in marked),
    ]


def _about_numbers(table: PaperTable) -> str:
    """Return what is measured, and under which settings."""
    measures = dict.fromkeys(cell.measure.title for cell in table.cells)
    unit = "; ratios to the first column" if table.experiment.definition.relative else ""
    return f"Shown: {'; '.join(measures)}{unit}. Scale {table.scale}, reading '{table.reading}'."


# ---- Markdown


def to_markdown(table: PaperTable) -> str:
    """Return the table and its notes, without a heading."""
    head, rows = arranged_head(table), arranged_rows(table)
    parts = [_about_numbers(table), "\n".join(markdown_table(head, rows))]
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    return "\n\n".join(parts) + "\n"


# ---- CSV and LaTeX


def to_csv(table: PaperTable) -> str:
    """Return a line for every value."""
    return csv_table(to_json(table)["cells"])


def to_latex(table: PaperTable) -> str:
    """Return the main table for a paper; it needs the package booktabs."""
    head = arranged_head(table)
    return latex_table(f"ll{'r' * (len(head) - 2)}", head, arranged_rows(table))


# ---- HTML


def to_html(table: PaperTable, figures: Mapping[str, Figure]) -> str:
    """Return one page without scripts or network access."""
    own = table.experiment.definition
    captions = {spec.name: spec.caption for spec in own.figures}
    body = [
        f"<p class=lead>{escape(describe_source(own.source, own.says))}</p>",
        f"<p class=lead>{escape(_about_numbers(table))}</p>",
        html_table(arranged_head(table), arranged_rows(table)),
        f"<p class=note>{escape(LEGEND)}</p>",
        html_figures(figures, captions),
        render_list(map(escape, table.notes)),
    ]
    return html_page(own.title, body, own.leaves_open)


def html_page(title: str, body: Sequence[str], leaves_open: Sequence[str]) -> str:
    """Return the page with this body, which ends with what the paper leaves open."""
    heading = "<h2>What the paper leaves open, and our choice</h2>"
    return render_document(title, [*body, heading, render_list(map(escape, leaves_open))])


def html_figures(figures: Mapping[str, Figure], captions: Mapping[str, str]) -> str:
    """Return the figures with their captions."""
    drawn = [render_figure(name, figure, captions[name]) for name, figure in figures.items()]
    return f"<div class=figures>{''.join(drawn)}</div>"


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of HTML, whose first two columns are names."""
    kinds = [" class=name"] * 2 + [""] * (len(head) - 2)
    cells = [
        [f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)]
        for row in rows
    ]
    return render_table([f"<th>{escape(name)}</th>" for name in head], cells)
