"""The table of an experiment: the paper's value, ours, the difference and a verdict in words."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from fedspd.config import ExperimentConfig, as_dict
from fedspd.core.scores import MISSING
from fedspd.paper.definition import (
    READINGS,
    Cell,
    PaperExperiment,
    ReadingName,
    RowSetting,
    ScaleName,
    Setting,
)
from fedspd.paper.measures import MEASURES, Measure
from fedspd.paper.records import Records
from fedspd.reporting.columns import MINUS
from fedspd.reporting.statistics import Interval, confidence_interval, paired_difference
from fedspd.storage.atomic import Json, flatten

TOLERANCE = 1.0  # points: the seeds of the paper's own table 4 differ by as much
TOLERATED_RATIO = 0.05
ONE_SEED = "one seed"
WIDE = {2: 9.0, 3: 2.5}  # seeds -> their interval's half-width, in standard deviations; 5: 1.2
SHRUNK = {  # keys that a scale changes, in words
    "clients": "{} clients instead of {}",
    "rounds": "{} rounds instead of {}",
    "data.examples": "{} examples per client instead of {}",
    "data.name": "{} instead of {}",
    "model.name": "the model {} instead of {}",
    "model.small": None,
    "training.epochs": "local epochs {} instead of {}",
    "fedspd.final_epochs": "final epochs {} instead of {}",
}


@dataclass(frozen=True)
class TableCell:
    """One value of the table."""

    row: Setting
    column: Setting
    measure: Measure
    seeds: int  # that have run
    planned: int
    paper: float | None
    other_data: str | None  # whose value the paper's is, if it is not of the same data
    ours: Interval
    digits: int
    verdict: str

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, if they are of the same data."""
        if self.paper is None or self.ours.mean is None or self.other_data is not None:
            return None
        return self.ours.mean - self.paper

    @property
    def texts(self) -> list[str]:
        """The paper's value, ours, the difference and the verdict."""
        paper = MISSING if self.paper is None else format_number(self.paper, 2)
        difference = MISSING if self.difference is None else signed(self.difference, self.digits)
        return [paper, format_ours(self.ours, self.digits), difference, self.verdict]


@dataclass(frozen=True)
class Gap:
    """How far a column is from the first one: in the paper, and in our runs, paired by seed."""

    row: Setting
    column: Setting
    paper: float | None
    ours: Interval
    verdict: str

    @property
    def texts(self) -> list[str]:
        """The paper's difference, ours and the verdict."""
        paper = MISSING if self.paper is None else signed(self.paper, 1)
        ours = MISSING if self.ours.mean is None else signed(self.ours.mean, 1)
        half = "" if self.ours.half is None else f" ± {self.ours.half:.1f}"
        return [paper, f"{ours}{half}", self.verdict]


@dataclass(frozen=True)
class PaperTable:
    """Everything that a report says in words."""

    experiment: PaperExperiment
    scale: ScaleName
    reading: ReadingName
    cells: list[TableCell]
    gaps: list[Gap]
    notes: list[str]


def make_table(
    experiment: PaperExperiment,
    scale: ScaleName,
    reading: ReadingName,
    records: Records,
    missing: dict[str, str] | None = None,
) -> PaperTable:
    """Return the table from the records alone; what has not run is marked so."""
    missing = missing or {}
    rows = shown_rows(experiment, scale, reading, records)
    columns = experiment.definition.columns
    table, gaps = [], []
    for row in rows:
        cells = [experiment.cell(row, column, scale, reading) for column in columns]
        scores = [scores_of(cell, records) for cell in cells]
        first = scores[0] if experiment.definition.relative else None
        table += [
            _table_cell(cell, own, first, len(records_of(cell, records)), scale, missing)
            for cell, own in zip(cells, scores, strict=True)
        ]
        has_methods = len({cell.configs[0].method for cell in cells}) > 1
        if has_methods and any(scores) and not experiment.definition.relative:
            gaps += [
                _gap(cells[0], scores[0], cell, own)
                for cell, own in zip(cells[1:], scores[1:], strict=True)
            ]
    ran = {cell.row.name for cell in table if cell.seeds}
    notes = [*_scale_notes(experiment, scale, [row for row in rows if row.name in ran])]
    notes += _seed_notes({cell.seeds for cell in table})
    notes += missing.values()
    notes += _reading_notes(experiment, scale, records, rows)
    notes += _curve_notes(experiment, scale, reading, records)
    return PaperTable(experiment, scale, reading, table, gaps, list(dict.fromkeys(notes)))


def shown_rows(
    experiment: PaperExperiment, scale: ScaleName, reading: ReadingName, records: Records
) -> list[RowSetting]:
    """Return all rows but those that stand in for a row that has run, or have not run."""
    has_run = {}
    for row in experiment.definition.rows:
        cells = [experiment.cell(row, c, scale, reading) for c in experiment.definition.columns]
        has_run[row.name] = any(records_of(cell, records) for cell in cells)
    return [
        row
        for row in experiment.definition.rows
        if row.stands_in_for is None or (has_run[row.name] and not has_run[row.stands_in_for])
    ]


def records_of(cell: Cell, records: Records) -> dict[int, Json]:
    """Return the records of the cell's runs, by seed."""
    return {c.seed: found for c in cell.configs if (found := records.of(c)) is not None}


def scores_of(cell: Cell, records: Records, measure: str | None = None) -> dict[int, float]:
    """Return what the cell's runs measured, by seed, in the table's unit."""
    shown = MEASURES[measure or cell.measure]
    values = {seed: shown.value_of(one) for seed, one in records_of(cell, records).items()}
    return {seed: value for seed, value in values.items() if value is not None}


def _table_cell(
    cell: Cell,
    scores: dict[int, float],
    first: dict[int, float] | None,
    seeds: int,
    scale: ScaleName,
    missing: Container[str],
) -> TableCell:
    measure, digits = MEASURES[cell.measure], MEASURES[cell.measure].digits
    if first is not None:
        scores = {seed: scores[seed] / first[seed] for seed in scores if first.get(seed)}
        digits = 2
    ours = confidence_interval(list(scores.values()))
    tolerance = TOLERANCE if first is None else TOLERATED_RATIO * (cell.paper or 0.0)
    if seeds:
        words = _verdict(cell, ours, tolerance, scale)
    else:
        words = "not run: no data" if cell.row.name in missing else "not run"
    return TableCell(
        cell.row,
        cell.column,
        measure,
        seeds,
        len(cell.configs),
        cell.paper,
        cell.other_data,
        ours,
        digits,
        words,
    )


def _verdict(cell: Cell, ours: Interval, tolerance: float, scale: ScaleName) -> str:
    if ours.mean is None:
        return "not recorded"
    if cell.paper is None:
        return "no number in the paper"
    if cell.other_data is not None:
        return f"not comparable: {cell.data} instead of {cell.other_data}"
    difference = ours.mean - cell.paper
    words = ["higher" if difference > 0 else "lower"]
    if abs(difference) <= tolerance:
        words = ["agrees"]
    elif abs(difference) <= (ours.half or 0.0):
        words = ["undecided"]
    words += [] if scale == "paper" else ["at another scale"]
    words += [ONE_SEED] if ours.half is None else []
    return ", ".join(words)


def _gap(first: Cell, base: dict[int, float], cell: Cell, scores: dict[int, float]) -> Gap:
    ours = paired_difference(scores, base)
    paper = None
    if cell.paper is not None and first.paper is not None:
        paper = cell.paper - first.paper
    verdict = _direction(paper, ours, cell.other_data)
    return Gap(cell.row, cell.column, paper, ours, verdict)


def _direction(paper: float | None, ours: Interval, other_data: str | None) -> str:
    if ours.mean is None:
        return "not run"
    if paper is None:
        return "no number in the paper"
    is_same = (paper > 0) == (ours.mean > 0)
    words = ["same side" if is_same else "opposite side"]
    if abs(ours.mean) <= (ours.half or 0.0):
        words = ["undecided"]
    words += [f"{other_data} in the paper"] if other_data else []
    words += [ONE_SEED] if ours.half is None else []
    return ", ".join(words)


# ---- notes


def _scale_notes(
    experiment: PaperExperiment, scale: ScaleName, rows: Sequence[RowSetting]
) -> list[str]:
    """Say once for each row what the scale changes."""
    changes: dict[str, list[str]] = {}
    for row in rows:
        column = experiment.definition.columns[0]
        own, full = (experiment.cell(row, column, s).configs[0] for s in (scale, "paper"))
        if words := describe_changes(own, full):
            changes.setdefault(words, []).append(row.name)
    where = {words: f"{', '.join(names)}: " for words, names in changes.items()}
    return [f"Scale {scale}. {where[w] if len(changes) > 1 else ''}{w}." for w in changes]


def _seed_notes(counts: Container[int]) -> list[str]:
    """Say what the intervals of few seeds do not show."""
    return [
        f"± of {seeds} seeds is {deviations} times their standard deviation, of 5 seeds 1.2 times: "
        "a wide interval says that there are few seeds."
        for seeds, deviations in WIDE.items()
        if seeds in counts
    ]


def describe_changes(own: ExperimentConfig, full: ExperimentConfig) -> str:
    """Return in words how a config differs from that of the paper's scale."""
    small, large = flatten(as_dict(own)), flatten(as_dict(full))
    words = []
    for key, form in SHRUNK.items():
        if small.get(key) != large.get(key):
            values = [tree.get(key) or "the default" for tree in (small, large)]
            words.append(form.format(*values) if form else "a smaller model")
    return ", ".join(words)


def _reading_notes(
    experiment: PaperExperiment, scale: ScaleName, records: Records, rows: Sequence[RowSetting]
) -> list[str]:
    """Give the values of FedSPD by both readings, and say which one is closer to the paper."""
    if experiment.definition.relative:
        return []
    values: list[str] = []
    misses: list[tuple[float, float]] = []  # of 'text' and of 'code'
    for row in rows:
        for column in experiment.definition.columns:
            text, code = (experiment.cell(row, column, scale, r) for r in READINGS)
            found = [confidence_interval(_scores(cell, records)).mean for cell in (text, code)]
            if text.configs == code.configs or found[0] is None or found[1] is None:
                continue
            values.append(f"{row.name}, {column.name}: {found[1]:.1f} instead of {found[0]:.1f}")
            if text.paper is not None and text.other_data is None:
                misses.append((abs(found[0] - text.paper), abs(found[1] - text.paper)))
    notes = [f"By the reading 'code' instead of 'text': {'; '.join(values)}."] if values else []
    return [*notes, _closer_reading(misses)] if misses else notes


def _closer_reading(misses: Sequence[tuple[float, float]]) -> str:
    text, code = (sum(column) / len(misses) for column in zip(*misses, strict=True))
    words = {"text": text, "code": code}
    closer, other = sorted(words, key=lambda name: words[name])
    return (
        f"The reading '{closer}' comes closer to the paper: it is {words[closer]:.1f} away on "
        f"average, the reading '{other}' {words[other]:.1f}; values compared: {len(misses)}."
    )


def _scores(cell: Cell, records: Records) -> list[float]:
    return list(scores_of(cell, records).values())


def _curve_notes(
    experiment: PaperExperiment, scale: ScaleName, reading: ReadingName, records: Records
) -> list[str]:
    """Name the runs whose records lack the curve that a figure shows."""
    wanted = {spec.measure for spec in experiment.definition.figures if spec.kind == "curves"}
    lacking: dict[str, list[str]] = {}
    for cell in experiment.cells(scale, reading):
        found = [record for config in cell.configs if (record := records.of(config))]
        for measure in wanted:
            if any(measure not in record.get("curve", {}) for record in found):
                lacking.setdefault(measure, []).append(f"{cell.row.name}, {cell.column.name}")
    return [
        f"Recorded without the {MEASURES[measure].title.removesuffix(' (%)')} by round, so not in "
        f"its figure: {'; '.join(cells)}. Run the experiment into another folder (--out) to have "
        "it recorded: that repeats all of its runs."
        for measure, cells in sorted(lacking.items())
    ]


# ---- numbers as text


def format_number(value: float, digits: int) -> str:
    """Return the number with commas between thousands."""
    return f"{value:,.{digits}f}"


def signed(value: float, digits: int) -> str:
    """Return the number with its sign."""
    return f"{'+' if value >= 0 else MINUS}{abs(value):,.{digits}f}"


def format_ours(score: Interval, digits: int) -> str:
    """Return the mean with ± half of its interval if that is known."""
    if score.mean is None:
        return MISSING
    half = "" if score.half is None else f" ± {format_number(score.half, digits)}"
    return f"{format_number(score.mean, digits)}{half}"


def to_json(table: PaperTable) -> Json:
    """Return the table as plain values."""
    return {
        "experiment": table.experiment.name,
        "source": table.experiment.definition.source,
        "scale": table.scale,
        "reading": table.reading,
        "cells": [
            {
                "row": cell.row.name,
                "column": cell.column.name,
                "measure": cell.measure.field,
                "seeds": cell.seeds,
                "planned": cell.planned,
                "paper": cell.paper,
                "ours": cell.ours.mean,
                "half": cell.ours.half,
                "difference": cell.difference,
                "verdict": cell.verdict,
            }
            for cell in table.cells
        ],
        "gaps": [
            {
                "row": gap.row.name,
                "column": gap.column.name,
                "paper": gap.paper,
                "ours": gap.ours.mean,
                "half": gap.ours.half,
                "verdict": gap.verdict,
            }
            for gap in table.gaps
        ],
        "notes": table.notes,
    }
