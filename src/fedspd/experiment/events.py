"""Events of a run: one per round with its metrics and alarms, and the summary at the end."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspd.config import ExperimentConfig, method_class, method_options
from fedspd.core.imports import options_table
from fedspd.core.metrics import (
    ALL_METRICS,
    ERRORS,
    Spread,
    accuracy_by_group,
    adjusted_rand_index,
    purity,
    switched_clients,
)
from fedspd.engines.engine import RoundReport
from fedspd.runtime.measures import Measures
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

TRAFFIC_KINDS = ("multicast", "point_to_point")
ADVICE = "try a smaller training.lr."
RATE = re.compile("(lr|rate|lambda_|mu|momentum|beta)$")  # ends the name of a rate
CLIENT_FIELDS = ("accuracy", "test_loss", "mixture")  # of result.json
LISTED_CLIENTS = 8  # in an alarm; of the others, only the number is given


def round_event(
    t: int,
    rate: float | None,
    report: RoundReport,
    measures: Measures | None,
    advice: str = ADVICE,
) -> Json:
    """Return the event of round t; `measures` is given where the round has an evaluation.

    `advice` is for a loss that is not finite.
    """
    event: Json = {"event": "round", "round": t, "steps": report.steps}
    if rate is not None:
        event["lr"] = rate
    event["traffic"] = [traffic.as_json() for traffic in report.traffic]
    event["bytes"] = {
        "multicast": sum(traffic.multicast_bytes for traffic in report.traffic),
        "point_to_point": sum(traffic.point_to_point_bytes for traffic in report.traffic),
    }
    event["seconds"] = {step: round(seconds, 6) for step, seconds in report.seconds.items()}
    if measures is not None:
        event |= metrics_fields(measures, advice)
    return event


def metrics_fields(measures: Measures, advice: str = ADVICE) -> Json:
    """Return the fields that an evaluation adds to an event."""
    fields: Json = {
        "accuracy": plain(measures.accuracy_C),
        "test_loss": plain(measures.test_loss_C),
        "alarms": alarms(measures, advice),
    }
    if measures.tests_C2D is not None and measures.tests_C2D.shape[2] > 1:
        accuracy_D = accuracy_by_group(measures.tests_C2D.sum(0))
        fields["accuracy_by_distribution"] = plain(accuracy_D)
    if measures.classes_2K is not None:
        fields["accuracy_by_class"] = plain(accuracy_by_group(measures.classes_2K))
    if measures.loss_C is not None:
        fields["loss"] = plain(measures.loss_C)
    fields |= {name: plain(score_C) for name, score_C in measures.scores_C.items()}
    for name, score_C in measures.validation_C.items():
        if np.isfinite(score_C).any():
            fields[f"validation_{name}"] = plain(score_C)
    if measures.clusters_C is not None:
        fields["clusters"] = int(measures.clusters_C.max())
    if measures.bodies_C is not None:
        fields["bodies"] = int(measures.bodies_C.max())
    if measures.spectrum_CM is not None and measures.spectrum_CM[0].any():
        fields["spectrum"] = plain(measures.spectrum_CM[0])  # the first client's decides for all
    if measures.mixture_CS is not None:
        fields["mixture"] = plain(measures.mixture_CS[:, : _clusters(measures)])
    if measures.table_CSD is not None:
        table_SD = measures.table_CSD.sum(0)[: _clusters(measures)]
        fields["table"] = table_SD.tolist()
        if table_SD.shape[1] > 1:  # with one distribution, any clustering is pure
            fields["purity"] = plain(np.array(purity(table_SD)))
            fields["adjusted_rand_index"] = plain(np.array(adjusted_rand_index(table_SD)))
    if measures.moments is not None:
        fields["consensus"] = plain(measures.moments.consensus_distance())
    return fields


def _clusters(measures: Measures) -> int | None:
    """Return the number of clusters that were found; None: all that there is room for."""
    return None if measures.clusters_C is None else int(measures.clusters_C.max())


def plain(numbers: NDArray[np.float64]) -> Any:
    """Return the numbers as nested lists, with null for those that JSON does not have.

    Nine digits are kept: sums in another order differ only beyond them.
    """
    rounded = [float(f"{x:.9g}") if np.isfinite(x) else None for x in numbers.ravel()]
    return np.array(rounded, dtype=object).reshape(numbers.shape).tolist()


# ---- alarms


def divergence_advice(config: ExperimentConfig) -> str:
    """Return what to try after a loss that is not finite: rates that were set above their default.

    Without such a rate it is the learning rate.
    """
    training, method = config.training, method_class(config)
    own = {field.name: field.default for field in fields(method) if field.default is not MISSING}
    tables = (
        ("training", dict(training), dict(type(training)())),
        (options_table(config.method), method_options(config), own),
    )
    raised = [
        f"{table}.{key.removesuffix('_')}"
        for table, options, defaults in tables
        for key, value in options.items()
        if RATE.search(key) and isinstance(value, float) and value > (defaults.get(key) or 0.0)
    ]
    if training.weight_decay * training.first_rate > 1:  # a step overshoots zero
        raised.append("training.weight_decay")
    return f"try a smaller {' or '.join(raised or ['training.lr'])}."


def alarms(measures: Measures, advice: str = ADVICE) -> list[str]:
    """Return a sentence about each finding to check before trusting the scores."""
    diverged = np.flatnonzero(_diverged(measures))
    if len(measures.test_loss_C) == 1:  # a node, or a network of one: nothing to compare it with
        return [f"The loss is not finite: {advice}"] if len(diverged) else []
    found = []
    if len(diverged):
        found.append(f"The loss is not finite at clients {listed(diverged)}: {advice}")
    if measures.table_CSD is not None:
        found += _cluster_alarms(measures.table_CSD[:, : _clusters(measures)])
    if measures.clusters_C is not None and len(np.unique(measures.clusters_C)) > 1:
        found.append(_disagreement(measures.clusters_C))
    return found


def _diverged(measures: Measures) -> NDArray[np.bool_]:
    """Return whose loss is not finite; a NaN in the training loss alone means none yet."""
    diverged_C = ~np.isfinite(measures.test_loss_C)
    return diverged_C if measures.loss_C is None else diverged_C | np.isinf(measures.loss_C)


def _cluster_alarms(table_CSD: NDArray[np.int64]) -> list[str]:
    empty = np.flatnonzero(table_CSD.sum((0, 2)) == 0)
    found = [f"Cluster {s} is empty at every client." for s in empty]
    if len(switched := switched_clients(table_CSD)):
        found.append(
            f"Labels are switched at clients {listed(switched)}: "
            "they label clusters differently from the rest."
        )
    return found


def _disagreement(clusters_C: NDArray[np.int64]) -> str:
    counts = zip(*np.unique(clusters_C, return_counts=True), strict=True)
    listed = ", ".join(f"{count} found {clusters}" for clusters, count in counts)
    return f"The clients found different numbers of clusters: {listed}."


def listed(clients: NDArray[np.int64]) -> str:
    """Return the first clients, and how many more there are."""
    shown = ", ".join(map(str, clients[:LISTED_CLIENTS]))
    others = len(clients) - LISTED_CLIENTS
    return f"{shown} and {others} more" if others > 0 else shown


# ---- the summary


def summary(run_folder: RunFolder, digests: list[str], classes: Sequence[str] = ()) -> Json:
    """Return the content of result.json, from the events of the run; `classes` are their names.

    One event at a time: those of many clients fill more memory than their models.
    """
    totals, last, before, final = _Totals(), Json(), Json(), Json()
    for final in run_folder.events():
        totals.add(final)
        if final["event"] == "round":
            last, before = final, final if "accuracy" in final else before
    metrics = [name for name in ALL_METRICS if name in final]
    return {
        "method": run_folder.read("run.json")["config"]["method"],
        "rounds": totals.rounds,
        "accuracy": _spread(final),
        "accuracy_before_final_phase": _spread(before),
        "metrics": {name: _spread(final, name) for name in metrics},
        "metrics_before_final_phase": {name: _spread(before, name) for name in metrics},
        "validation": _validation(final),
        "best_round": final.get("best_round"),
        "stopped": final.get("stopped"),
        "clients": {name: final.get(name) for name in (*CLIENT_FIELDS, *metrics)},
        "newcomers": _newcomers(final),
        "clusters": final.get("clusters"),
        "bodies": final.get("bodies"),
        "spectrum": final.get("spectrum"),
        "distributions": _distributions(run_folder, final),
        "classes": _classes(final, classes),
        "purity": final.get("purity"),
        "adjusted_rand_index": final.get("adjusted_rand_index"),
        "consensus": final.get("consensus"),
        **_privacy(final if "privacy" in final else last),
        **totals.as_json(),
        "alarms": final["alarms"],
        "hash": hashlib.sha256("".join(digests).encode()).hexdigest(),
    }


def _newcomers(final: Json) -> Json | None:
    scores = final.get("newcomers")
    return None if scores is None else {**scores, "accuracy": _spread(scores)}


def _distributions(run_folder: RunFolder, final: Json) -> Json | None:
    """Return the accuracy by distribution, of the worst and of the smallest of them.

    The smallest is that with the fewest test examples: every client has equally many, so they
    stand for clients. Of several that are equally small, it is the worst.
    """
    accuracy = final.get("accuracy_by_distribution")
    if accuracy is None:
        return None
    partition = run_folder.read("partition.json")
    clients = partition["clients"][: len(final["accuracy"])]  # newcomers come after these
    tested = np.sum([client["test"]["counts"] for client in clients], axis=0).tolist()
    known = [(size, score) for size, score in zip(tested, accuracy, strict=True) if size]
    return {
        "names": [distribution["name"] for distribution in partition["distributions"]],
        "accuracy": accuracy,
        "worst": min(score for _, score in known),
        "smallest": min(known)[1],
    }


def _classes(final: Json, names: Sequence[str]) -> Json | None:
    """Return the accuracy on the test examples of each class, by name; None in a regression."""
    accuracy = final.get("accuracy_by_class")
    if accuracy is None:
        return None
    return {"names": list(names), "accuracy": accuracy[: len(names)]}  # a model may have more


def _privacy(last: Json) -> Json:
    """Return the largest epsilon of a client against all others; nothing without privacy."""
    spent = last.get("privacy")
    return {} if spent is None else {"epsilon": max(spent["epsilon"])}


class _Totals:
    """The totals of a run: models, bytes, gradient steps and seconds."""

    def __init__(self) -> None:
        self.rounds = self.models_sent = self.steps = 0
        self.seconds = 0.0
        self.bytes = dict.fromkeys(TRAFFIC_KINDS, 0)

    def add(self, event: Json) -> None:
        """Add an event; the final phase sends nothing that counts."""
        if event["event"] == "round":
            self.rounds += 1
            traffic = [sent for sent in event["traffic"] if sent["is_model"]]
            self.models_sent += sum(len(sent["models"]) for sent in traffic)
            for kind in TRAFFIC_KINDS:
                self.bytes[kind] += event["bytes"][kind]
        if event["event"] in ("round", "final"):
            self.steps += event["steps"]
            self.seconds += event["seconds"]["total"]

    def as_json(self) -> Json:
        """Return the totals by name."""
        return {
            "models_sent": self.models_sent,
            "bytes": self.bytes,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
        }


def _validation(final: Json) -> Json | None:
    """Return the means over clients of the scores of validation examples, by name."""
    prefix = "validation_"
    names = [name for name in final if name.startswith(prefix)]
    means = {name.removeprefix(prefix): _spread(final, name)["mean"] for name in names}
    return means or None


def _spread(event: Json, name: str = "accuracy") -> Json:
    """Return mean, standard deviation and so on of a score across clients."""
    scores = [np.nan if score is None else score for score in event[name]]
    spread = asdict(Spread.of(np.array(scores, dtype=float), is_error=name in ERRORS))
    return {name: plain(np.array(value)) for name, value in spread.items()}
