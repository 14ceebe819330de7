"""Figures, tables and pages of runs, from their records alone."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from fedspd.core.metrics import relabelling
from fedspd.reporting import figures, html, tables
from fedspd.reporting.runs import canonical, comparable, gather, label, mean, spot
from fedspd.reporting.statistics import Comparison, Interval, MethodRow, compare, lines
from fedspd.reporting.tables import loss, megabytes, percent
from fedspd.storage.atomic import Json, disk_errors
from fedspd.storage.run_folder import RunFolder

Curve = tuple[list[int], list[float], list[float] | None]
Figures = dict[str, Figure]
CURVES_AT_MOST = 8  # in one figure


def table(summaries: dict[str, Json]) -> Table:
    """One row per run: what the clients got, a regression's being a loss, and what it cost."""
    classified = any(summary["accuracy"]["mean"] is not None for summary in summaries.values())
    title = (
        "Test accuracy over clients (%), and what was sent"
        if classified
        else "Test loss over clients, and what was sent"
    )
    shown = Table(title=title, title_justify="left")
    scores = ("mean", "spread", "worst tenth", "before final") if classified else ("mean",)
    for column in ("method", *scores, "models", "MB cast", "MB 1 to 1", "s"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    for name, summary in summaries.items():
        sent = summary["bytes"]
        cost = [
            f"{summary['models_sent']:,}",
            megabytes(sent["multicast"]),
            megabytes(sent["point_to_point"]),
            f"{summary['seconds']:.1f}",
        ]
        shown.add_row(
            name,
            *(
                _accuracies(summary)
                if classified
                else [loss(mean(summary["clients"]["test_loss"]))]
            ),
            *cost,
        )
    return shown


def _accuracies(summary: Json) -> list[str]:
    score, before = summary["accuracy"], summary["accuracy_before_final_phase"]
    return [percent(part) for part in (score["mean"], score["std"], score["worst"], before["mean"])]


# ---- the figures of some runs


def write_figures(runs: list[Path], folder: Path) -> list[Path]:
    """Accuracy by round and box plot over all runs; the graph and the mixtures over time of the first that has them."""
    records = {_name(run): RunFolder.open(run) for run in runs}
    curves = {name: curve for name, record in records.items() if (curve := _curve(record))[0]}
    finals = {name: record.read("result.json") for name, record in records.items()}
    scores = {
        name: result["clients"]["accuracy"]
        for name, result in finals.items()
        if None not in result["clients"]["accuracy"]
    }
    made: Figures = {}
    if scores:
        ends = {
            name: (finals[name]["accuracy"]["mean"], finals[name]["accuracy"]["std"])
            for name in scores
        }
        made["accuracy-by-round"] = figures.accuracy_by_round(
            {n: c for n, c in curves.items() if n in scores}, ends, figures.OVER_CLIENTS
        )
        made["clients"] = figures.client_boxes(scores)
    return _save(made | _network_and_mixtures(next(iter(records.values()))), folder)


def _save(made: Figures, folder: Path) -> list[Path]:
    return [path for name, figure in made.items() for path in figures.save(figure, folder, name)]


def _name(run: Path) -> str:
    return str(RunFolder.open(run).read("run.json")["config"]["method"])


def _curve(record: RunFolder) -> Curve:
    rounds, means, spreads = [], [], []
    for event in record.events():
        if event["event"] == "round" and None not in event.get("accuracy", [None]):
            rounds.append(event["round"])
            means.append(float(np.mean(event["accuracy"])))
            spreads.append(float(np.std(event["accuracy"])))
    return rounds, means, spreads


def _network_and_mixtures(record: RunFolder) -> Figures:
    rounds = [
        event for event in record.events() if event["event"] == "round" and "mixture" in event
    ]
    made = {"network": _network(record)}
    if rounds:
        made["mixtures-by-round"] = figures.mixtures_by_round(
            [e["round"] for e in rounds], [e["mixture"] for e in rounds]
        )
    return made


def _network(record: RunFolder) -> Figure:
    edges = [(i, j) for i, j in record.read("topology.json")["list"]]
    clients = record.read("result.json")["clients"]
    mixtures, truth = (
        clients["mixture"],
        _true_mixture(record)[: len(clients["accuracy"])],
    )  # newcomers are no part of the graph
    return figures.network(edges, mixtures, len(truth), truth if mixtures else None)


def _true_mixture(record: RunFolder) -> list[list[float]]:
    """Each client's true shares, in the order of the clusters that stand for them."""
    counts = np.array(
        [client["train"]["counts"] for client in record.read("partition.json")["clients"]],
        dtype=float,
    )
    shares = counts / counts.sum(1, keepdims=True)
    *_, last = record.events()
    match = relabelling(np.array(last["table"])) if "table" in last else np.arange(shares.shape[1])
    none = np.zeros(
        (len(shares), 1)
    )  # the last column: what a cluster that stands for no distribution has of the truth
    order = [*match, *(d for d in range(shares.shape[1]) if d not in match)]
    return [[float(share) for share in row] for row in np.hstack([shares, none])[:, order]]


# ---- the report of a comparison


def write_report(folders: Sequence[Path], out: Path) -> Comparison:
    """report.html, .md, .csv and .json, and figures/, of the comparable ones among the finished runs in these folders."""
    runs, unfinished = gather(folders)
    kept, others = comparable(runs)
    comparison = compare(kept, unfinished + others)
    common = _comparison_figures(comparison)
    by_point = (
        {}
        if _few(comparison)
        else {spot(point): _curves(_at(comparison, point)) for point in comparison.points}
    )
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    _save(common, out / "figures")
    record = RunFolder(out)
    record.write("report.md", tables.markdown(comparison))
    record.write("report.csv", tables.as_csv(comparison))
    record.write("report.json", as_json(comparison))
    record.write("report.html", html.page(comparison, common, by_point))
    return comparison


def as_json(comparison: Comparison) -> Json:
    plain = {
        "axes": comparison.axes,
        "rows": [asdict(row) for row in comparison.rows],
        "notes": comparison.notes,
    }
    runs = [
        {"folder": str(run.folder), "method": run.method, "seed": run.seed, "point": run.point}
        for run in comparison.runs
    ]
    found: Json = json.loads(json.dumps({**plain, "alarms": comparison.alarms, "runs": runs}))
    return found


def _few(comparison: Comparison) -> bool:
    """Few enough that one figure can show all their curves."""
    return len(comparison.rows) <= CURVES_AT_MOST or len(comparison.points) == 1


def _at(comparison: Comparison, point: Json) -> dict[str, MethodRow]:
    there = [row for row in comparison.rows if canonical(row.shared_point) == canonical(point)]
    return {
        label(row.method, {key: row.point[key] for key in row.point if key not in point}): row
        for row in there
    }


def _comparison_figures(comparison: Comparison) -> Figures:
    """Of a sweep the accuracy along each axis; the curves, if they are few; then the graph and the mixtures of one run."""
    made: Figures = {}
    for axis in comparison.axes:
        drawn = {
            place: panel
            for place, found in lines(comparison, axis).items()
            if (panel := _drawable(found))
        }
        if any(len(line) > 1 for panel in drawn.values() for line in panel.values()):
            made[f"accuracy-by-{axis}"] = figures.accuracy_by_value(axis, drawn)
    if _few(comparison):
        only, *others = comparison.points
        made |= _curves(
            {row.label: row for row in comparison.rows} if others else _at(comparison, only)
        )
    return made | _network_and_mixtures(RunFolder(comparison.example.folder))


def _drawable(
    found: dict[str, list[tuple[Any, Interval]]],
) -> dict[str, list[tuple[Any, float, float]]]:
    known = {
        name: [
            (_tick(value), score.mean, score.half or 0.0)
            for value, score in line
            if score.mean is not None
        ]
        for name, line in found.items()
    }
    return {name: line for name, line in known.items() if line}


def _tick(value: Any) -> float | str:
    """An option of a method of one's own may be a list."""
    return value if isinstance(value, int | float) else str(value)


def _curves(rows: dict[str, MethodRow]) -> Figures:
    shown = {
        name: row
        for name, row in rows.items()
        if row.curve.rounds and row.accuracy.mean is not None
    }
    if not shown:
        return {}
    bands = {name: _band(row.curve.accuracy) for name, row in shown.items()}
    ends = {
        name: (row.accuracy.mean or 0.0, row.accuracy.half or 0.0) for name, row in shown.items()
    }
    clients = {
        name: [score for seed in row.clients for score in seed if score is not None]
        for name, row in shown.items()
    }
    return {
        "accuracy-by-round": figures.accuracy_by_round(
            {name: (row.curve.rounds, *bands[name]) for name, row in shown.items()}, ends
        ),
        "accuracy-by-bytes": figures.accuracy_by_bytes(
            {name: (row.curve.bytes, *bands[name]) for name, row in shown.items()}
        ),
        "clients": figures.client_boxes(clients),
    }


def _band(scores: list[Interval]) -> tuple[list[float], list[float] | None]:
    means = [np.nan if score.mean is None else score.mean for score in scores]
    known = any(score.half is not None for score in scores)
    return means, [score.half or 0.0 for score in scores] if known else None
