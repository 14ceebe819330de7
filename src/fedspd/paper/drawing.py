"""Draw the figures of an experiment from its records, in the paper's arrangement."""

import re
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from fedspd.paper.definition import (
    Cell,
    FigureSpec,
    PaperExperiment,
    ReadingName,
    RowSetting,
    ScaleName,
)
from fedspd.paper.measures import MEASURES
from fedspd.paper.records import Records
from fedspd.paper.table import records_of, scores_of, shown_rows
from fedspd.reporting import panels
from fedspd.reporting.figures import OVER_SEEDS, Curve, Line
from fedspd.reporting.statistics import Interval, confidence_interval

Grid = dict[str, dict[str, Cell]]  # row -> column -> cell
PAPER_LABEL = "the paper"
PAIR = 2  # seeds, whose interval is nine times their standard deviation


def draw_figures(
    experiment: PaperExperiment, scale: ScaleName, reading: ReadingName, records: Records
) -> dict[str, Figure]:
    """Return the figures for which there are records, by file name."""
    own = experiment.definition
    rows = shown_rows(experiment, scale, reading, records)
    grid = {row.name: _cells(experiment, row, scale, reading, records) for row in rows}
    grid = {row: cells for row, cells in grid.items() if cells}
    columns = [column.name for column in own.columns]
    draw: dict[str, Callable[[FigureSpec, Grid, Records], Figure | None]] = {
        "curves": partial(_draw_curves, columns=columns),
        "lines": _draw_lines,
        "boxes": _draw_boxes,
    }
    drawn = {spec.name: draw[spec.kind](spec, grid, records) for spec in own.figures if grid}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _cells(
    experiment: PaperExperiment,
    row: RowSetting,
    scale: ScaleName,
    reading: ReadingName,
    records: Records,
) -> dict[str, Cell]:
    """Return the cells of a row that have run."""
    cells = [experiment.cell(row, c, scale, reading) for c in experiment.definition.columns]
    return {cell.column.name: cell for cell in cells if records_of(cell, records)}


def _draw_curves(
    spec: FigureSpec, grid: Grid, records: Records, columns: Sequence[str]
) -> Figure | None:
    """Draw the rows with a curve; the table's notes name the runs that did not record one."""
    shown = {
        row: {name: curve for name, c in cells.items() if (curve := _curve(c, spec, records))}
        for row, cells in grid.items()
    }
    shown = {row: curves for row, curves in shown.items() if curves}
    about = _axis_title(spec), columns, _spread_words(grid, records)
    return panels.draw_curves(_title(spec), shown, *about) if shown else None


def _curve(cell: Cell, spec: FigureSpec, records: Records) -> Curve | None:
    """Return the mean over seeds by round, with its spread; None without record."""
    measure = spec.measure
    found = records_of(cell, records).values()
    curves = [r["curve"] for r in found if measure in r["curve"]]
    if not curves:
        return None
    values = [curve[measure] for curve in curves]
    scores = [_drawn_spread(seeds) for seeds in zip(*values, strict=True)]
    unit = MEASURES[measure].factor / 100  # curves are drawn in per cent of a fraction
    means = [np.nan if score.mean is None else unit * score.mean for score in scores]
    halves = [unit * (score.half or 0.0) for score in scores] if len(curves) > 1 else None
    return curves[0]["round"], means, halves


def _draw_lines(spec: FigureSpec, grid: Grid, records: Records) -> Figure:
    lines: dict[str, Line] = {}
    quoted: dict[str, Line] = {}
    for row, cells in grid.items():
        for name, cell in cells.items():
            score = _drawn_spread(list(scores_of(cell, records, spec.measure).values()))
            if score.mean is not None:
                point = (number_of(name), score.mean / 100, (score.half or 0.0) / 100)
                lines.setdefault(row, []).append(point)
            if cell.paper is not None and cell.other_data is None:
                quoted.setdefault(row, []).append((number_of(name), cell.paper / 100, 0.0))
    several = [row for row in lines if len(lines[row]) > 1]  # one point is no line
    shown = {row: _with_paper({row: lines[row]}, quoted) for row in several or lines}
    if not spec.panels:
        shown = {"": _with_paper(lines, quoted)}
    about = _axis_title(spec), _spread_words(grid, records)
    of_paper = {_paper_label(row): row for row in quoted}
    return panels.draw_lines(_title(spec), _capital(spec.axis), shown, *about, of_paper)


def _with_paper(lines: dict[str, Line], quoted: dict[str, Line]) -> dict[str, Line]:
    values = {row: quoted[row] for row in lines if row in quoted}
    return lines | {_paper_label(row): line for row, line in values.items()}


def _paper_label(row: str) -> str:
    return f"{row}, {PAPER_LABEL}"


def number_of(name: str) -> float | str:
    """Return the number in a column's name, such as 0.3 in 'p = 0.3', or else the name."""
    found = re.findall(r"-?\d+(?:\.\d+)?", name)
    return float(found[0]) if len(found) == 1 else name


def _draw_boxes(spec: FigureSpec, grid: Grid, records: Records) -> Figure:
    shown = {
        row: {
            name: [s for one in records_of(cell, records).values() for s in one["clients"]]
            for name, cell in cells.items()
        }
        for row, cells in grid.items()
    }
    return panels.draw_boxes(_title(spec), shown)


def _drawn_spread(scores: Sequence[float]) -> Interval:
    """Return the mean and its interval; of two scores, which leave an interval too wide to draw,
    half of their distance."""
    found = confidence_interval(scores)
    half = abs(scores[0] - scores[1]) / 2 if len(scores) == PAIR else found.half
    return Interval(found.mean, half)


def _spread_words(grid: Grid, records: Records) -> str:
    """Return what a band or a bar shows, and of how many seeds."""
    cells = [cell for row in grid.values() for cell in row.values()]
    counts = {len(records_of(cell, records)) for cell in cells} - {1}
    several = ", ".join(str(count) for count in sorted(counts - {PAIR}))
    words = [f"{OVER_SEEDS} ({several})"] if several else []
    words += ["both of two seeds"] if PAIR in counts else []
    return "; ".join(words)


def _title(spec: FigureSpec) -> str:
    return spec.caption.removesuffix(".")


def _axis_title(spec: FigureSpec) -> str:
    return _capital(MEASURES[spec.measure].title)


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]
