"""Figures and tables of runs, from their records alone."""

from pathlib import Path

import numpy as np
from rich.table import Table

from fedspd.metrics import relabelling
from fedspd.record import Json, Record
from fedspd.report import figures

Curve = tuple[list[int], list[float], list[float] | None]


def table(summaries: dict[str, Json]) -> Table:
    """One row per run: what the clients got, and what it cost."""
    shown = Table(title="Test accuracy over clients (%), and what was sent", title_justify="left")
    for column in ("method", "mean", "spread", "worst tenth", "before final", "models", "MB multicast", "MB one-to-one", "s"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    for name, summary in summaries.items():
        score, before, sent = summary["accuracy"], summary["accuracy_before_final_phase"], summary["bytes"]
        accuracies = [percent(score["mean"]), percent(score["std"]), percent(score["worst"]), percent(before["mean"])]
        cost = [f"{summary['models_sent']:,}", megabytes(sent["multicast"]), megabytes(sent["point_to_point"]), f"{summary['seconds']:.1f}"]
        shown.add_row(name, *accuracies, *cost)
    return shown


def percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f}"


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f}"


def write_figures(runs: list[Path], folder: Path) -> list[Path]:
    """Accuracy by round and box plot over all runs; the graph and the mixtures over time of the first that has them."""
    records = {_name(run): Record.open(run) for run in runs}
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    curves = {name: curve for name, record in records.items() if (curve := _curve(record))[0]}
    finals = {name: record.read("result.json") for name, record in records.items()}
    scores = {name: result["clients"]["accuracy"] for name, result in finals.items() if None not in result["clients"]["accuracy"]}
    if scores:
        ends = {name: (finals[name]["accuracy"]["mean"], finals[name]["accuracy"]["std"]) for name in scores}
        made += figures.save(figures.accuracy_by_round({n: c for n, c in curves.items() if n in scores}, ends), folder, "accuracy-by-round")
        made += figures.save(figures.client_boxes(scores), folder, "clients")
    made += _network(next(iter(records.values())), folder)
    return made + _mixtures(next(iter(records.values())), folder)


def _name(run: Path) -> str:
    return str(Record.open(run).read("run.json")["config"]["method"])


def _curve(record: Record) -> Curve:
    rounds, means, spreads = [], [], []
    for event in record.events():
        if event["event"] == "round" and None not in event.get("accuracy", [None]):
            rounds.append(event["round"])
            means.append(float(np.mean(event["accuracy"])))
            spreads.append(float(np.std(event["accuracy"])))
    return rounds, means, spreads


def _network(record: Record, folder: Path) -> list[Path]:
    edges = [(i, j) for i, j in record.read("topology.json")["list"]]
    mixtures, truth = record.read("result.json")["clients"]["mixture"], _true_mixture(record)
    return figures.save(figures.network(edges, mixtures, len(truth), truth if mixtures else None), folder, "network")


def _true_mixture(record: Record) -> list[list[float]]:
    """Each client's true shares, in the order of the clusters that stand for them."""
    counts = np.array([client["train"]["counts"] for client in record.read("manifest.json")["clients"]], dtype=float)
    shares = counts / counts.sum(1, keepdims=True)
    *_, last = record.events()
    match = relabelling(np.array(last["table"])) if "table" in last else np.arange(shares.shape[1])
    order = [d for d in match if d >= 0] + [d for d in range(shares.shape[1]) if d not in match]
    return [[float(share) for share in row] for row in shares[:, order]]


def _mixtures(record: Record, folder: Path) -> list[Path]:
    rounds = [event for event in record.events() if event["event"] == "round" and "mixture" in event]
    if not rounds:
        return []
    shown = figures.mixtures_by_round([event["round"] for event in rounds], [event["mixture"] for event in rounds])
    return figures.save(shown, folder, "mixtures-by-round")
