"""Choose and draw the figures of single runs and of comparisons from their records."""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedspd.core.metrics import relabelling
from fedspd.core.scores import Score, main_score
from fedspd.reporting import figure_files, figures, network_figure
from fedspd.reporting.method_rows import Comparison, MethodRow, ScoreLine, score_along
from fedspd.reporting.points import canonical_json, format_label, format_point
from fedspd.reporting.statistics import Interval
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

Figures = dict[str, Figure]  # by file name
CURVES_AT_MOST = 8  # in one figure


def save_figures(drawn: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Save each figure as PNG and PDF, and return their paths."""
    pairs = drawn.items()
    return [path for name, figure in pairs for path in figure_files.save(figure, folder, name)]


# ---- single runs


def draw_run(folder: Path) -> Figures:
    """Draw the scores, the graph and the mixtures of one run."""
    record = RunFolder.open(folder)
    return _draw_score({_read_method(record): record}) | _draw_network_and_mixtures(record)


def write_figures(runs: list[Path], folder: Path) -> list[Path]:
    """Draw the scores of all runs, and the graph and the mixtures of the first one."""
    records = [RunFolder.open(run) for run in runs]
    scores = _draw_score({_read_method(record): record for record in records})
    return save_figures(scores | _draw_network_and_mixtures(records[0]), folder)


def _read_method(record: RunFolder) -> str:
    return str(record.read("run.json")["config"]["method"])


def _draw_score(records: dict[str, RunFolder]) -> Figures:
    """Draw the accuracy, or the RMSE of a regression, by round and client."""
    results = {method: record.read_complete("result.json") for method, record in records.items()}
    score = main_score(next(iter(results.values()))["clients"])
    clients = {method: _known(result["clients"][score.name]) for method, result in results.items()}
    curves = {method: _read_curve(record, score) for method, record in records.items()}
    final = {method: (np.mean(own), np.std(own)) for method, own in clients.items() if own}
    return {
        f"{score.stem}-by-round": figures.draw_accuracy_by_round(
            {method: curve for method, curve in curves.items() if curve[0]},
            {method: (float(mean), float(std)) for method, (mean, std) in final.items()},
            figures.OVER_CLIENTS,
            score,
        ),
        "clients": figures.draw_client_boxes(clients, score),
    }


def _read_curve(record: RunFolder, score: Score) -> figures.Curve:
    """Return the evaluated rounds with mean and standard deviation over clients."""
    rounds, means, deviations = [], [], []
    for event in record.events():
        if event["event"] == "round" and (known := _known(event.get(score.name, ()))):
            rounds.append(event["round"])
            means.append(float(np.mean(known)))
            deviations.append(float(np.std(known)))
    return rounds, means, deviations


def _known(scores: Sequence[float | None]) -> list[float]:
    """Return the scores that are finite."""
    return [score for score in scores if score is not None]


def _draw_network_and_mixtures(record: RunFolder) -> Figures:
    drawn = {"network": _draw_network(record)}
    # One event at a time: those of many clients fill more memory than their models.
    mixtures = [
        (event["round"], np.array(event["mixture"], dtype=float))
        for event in record.events()
        if event["event"] == "round" and "mixture" in event
    ]
    clusters = mixtures[-1][1].shape[1] if mixtures else 0
    if clusters > 1:
        # Before a method has found its clusters, there is no mixture to show.
        mixtures = [pair for pair in mixtures if pair[1].shape[1] == clusters]
        drawn["mixtures-by-round"] = figures.draw_mixtures_by_round(
            [t for t, _ in mixtures], [share_NS for _, share_NS in mixtures]
        )
    return drawn


def _draw_network(record: RunFolder) -> Figure:
    edges = [(i, j) for i, j in record.read_complete("topology.json")["list"]]
    clients = record.read_complete("result.json")["clients"]
    count, mixtures = len(clients["accuracy"]), clients["mixture"]
    truth = true_mixtures(record)[:count] if mixtures else None  # newcomers are not in the graph
    return network_figure.draw_network(edges, mixtures, count, truth)


def true_mixtures(record: RunFolder) -> list[list[float]]:
    """Return each client's true shares, in the order of the clusters that stand for them."""
    clients = record.read_complete("partition.json")["clients"]
    count_ND = np.array([client["train"]["counts"] for client in clients], dtype=float)
    share_ND = count_ND / count_ND.sum(1, keepdims=True)
    N, D = share_ND.shape
    (last,) = deque(record.events(), maxlen=1)
    match = relabelling(np.array(last["table"])) if "table" in last else np.arange(D)
    order = [*match, *(d for d in range(D) if d not in match)]
    # A cluster that stands for no distribution is matched with the last column.
    padded = np.hstack([share_ND, np.zeros((N, 1))])
    return [[float(share) for share in shares] for shares in padded[:, order]]


# ---- comparisons


def draw_comparison(comparison: Comparison) -> Figures:
    """Draw the score along each axis, the curves if they are few, and one run's graph."""
    drawn: Figures = {}
    for axis in comparison.axes:
        panels = _drawable_panels(score_along(comparison, axis))
        lines = [line for panel in panels.values() for line in panel.values()]
        if any(len(line) > _fewest(comparison, axis) for line in lines):
            name = f"{comparison.score.stem}-by-{axis}"
            drawn[name] = figures.draw_accuracy_by_value(axis, panels, comparison.score)
    if _has_few_curves(comparison):
        only, *others = comparison.shared_points
        rows = _rows_at(comparison, only)
        rows = {row.label: row for row in comparison.rows} if others else rows
        drawn |= _draw_curves(rows, comparison.score)
    return drawn | _draw_network_and_mixtures(RunFolder(comparison.example.folder))


def _fewest(comparison: Comparison, axis: str) -> int:
    """Return how many values of the axis the table shows well enough without a figure.

    With two values of one method's own option, among other methods, it has two rows to compare.
    """
    is_own = axis not in comparison.shared_axes
    return 2 if is_own and len({row.method for row in comparison.rows}) > 1 else 1


def draw_points(comparison: Comparison) -> dict[str, Figures]:
    """Draw the curves of each shared point, if they are too many for one figure."""
    if _has_few_curves(comparison):
        return {}
    return {
        format_point(point): _draw_curves(_rows_at(comparison, point), comparison.score)
        for point in comparison.shared_points
    }


def _has_few_curves(comparison: Comparison) -> bool:
    return len(comparison.rows) <= CURVES_AT_MOST or len(comparison.shared_points) == 1


def _rows_at(comparison: Comparison, point: Json) -> dict[str, MethodRow]:
    """Return the rows at this shared point, labelled with their methods' own options."""
    rows = {}
    for row in comparison.rows:
        if canonical_json(row.shared_point) == canonical_json(point):
            own = {key: value for key, value in row.point.items() if key not in point}
            rows[format_label(row.method, own)] = row
    return rows


def _drawable_panels(panels: dict[str, dict[str, ScoreLine]]) -> dict[str, dict[str, figures.Line]]:
    """Return the panels without unknown scores, and without what is empty then."""
    drawable: dict[str, dict[str, figures.Line]] = {}
    for title, lines in panels.items():
        for label, line in lines.items():
            known = [
                (_tick(value), s.mean, s.half or 0.0) for value, s in line if s.mean is not None
            ]
            if known:
                drawable.setdefault(title, {})[label] = known
    return drawable


def _tick(value: Any) -> float | str:
    """Return the value as a label: an option of a user's own method may be a list."""
    return value if isinstance(value, int | float) else str(value)


def _draw_curves(rows: dict[str, MethodRow], score: Score) -> Figures:
    """Draw the score by round, by bytes, by seconds and steps, and by client."""
    shown = {
        label: row for label, row in rows.items() if row.curve.rounds and row.score.mean is not None
    }
    if not shown:
        return {}
    bands = {label: _band(row.curve.score) for label, row in shown.items()}
    by_round = {label: (row.curve.rounds, *bands[label]) for label, row in shown.items()}

    def by_cost(cost: str, unit: float = 1) -> dict[str, figures.Curve]:
        return {
            label: ([number / unit for number in getattr(row.curve, cost)], *bands[label])
            for label, row in shown.items()
        }

    sent = {"Megabytes sent by all clients": by_cost("bytes", 1e6)}
    work = {"Seconds": by_cost("seconds"), "Gradient steps of all clients": by_cost("steps")}
    final = {label: (row.score.mean or 0.0, row.score.half or 0.0) for label, row in shown.items()}
    clients = {
        label: [score for scores in row.clients for score in scores if score is not None]
        for label, row in shown.items()
    }
    return {
        f"{score.stem}-by-round": figures.draw_accuracy_by_round(by_round, final, score=score),
        f"{score.stem}-by-bytes": figures.draw_accuracy_by_cost(
            "bytes sent, point-to-point", sent, score
        ),
        f"{score.stem}-by-time": figures.draw_accuracy_by_cost("time and work", work, score),
        "clients": figures.draw_client_boxes(clients, score),
    }


def _band(scores: list[Interval]) -> tuple[list[float], list[float] | None]:
    """Return means and half-widths, these only if one is known."""
    means = [np.nan if score.mean is None else score.mean for score in scores]
    is_known = any(score.half is not None for score in scores)
    return means, [score.half or 0.0 for score in scores] if is_known else None
