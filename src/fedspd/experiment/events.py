"""What is written down about a run: an event per round, its alarms, and the summary at the end."""

import hashlib
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspd.core.metrics import Spread, purity, switched_clients
from fedspd.engines.engine import RoundReport
from fedspd.runtime.measures import Measures
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder


def round_event(t: int, rate: float | None, report: RoundReport, measures: Measures | None) -> Json:
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
        event |= metrics_fields(measures)
    return event


def metrics_fields(measures: Measures) -> Json:
    found: Json = {
        "accuracy": plain(measures.accuracy_C),
        "test_loss": plain(measures.test_loss_C),
        "alarms": alarms(measures),
    }
    if measures.loss_C is not None:
        found["loss"] = plain(measures.loss_C)
    if measures.mixture_CS is not None:
        found["mixture"] = plain(measures.mixture_CS)
    if measures.table_CSD is not None:
        table = measures.table_CSD.sum(0)
        found["table"] = table.tolist()
        if table.shape[1] > 1:  # of one distribution any clustering is pure
            found["purity"] = plain(np.array(purity(table)))
    if measures.moments is not None:
        found["consensus"] = plain(measures.moments.consensus_distance())
    return found


def alarms(measures: Measures) -> list[str]:
    """What a person should look at before believing the numbers."""
    found, diverged = [], np.flatnonzero(_diverged(measures))
    if (
        len(measures.test_loss_C) == 1
    ):  # a node, or a network of one: there is nobody to compare it with
        return ["The loss is not finite: try a smaller training.lr."] if len(diverged) else []
    if len(diverged):
        found.append(
            f"The loss is not finite at clients {_some(diverged)}: try a smaller training.lr."
        )
    if measures.table_CSD is not None:
        for s in np.flatnonzero(measures.table_CSD.sum((0, 2)) == 0):
            found.append(f"Cluster {s} is empty at every client.")
        if len(switched := switched_clients(measures.table_CSD)):
            found.append(
                f"Labels are switched at clients {_some(switched)}: they name the clusters unlike the rest."
            )
    return found


def _diverged(measures: Measures) -> NDArray[np.bool_]:
    """A training loss of NaN alone is one that the method has not taken yet."""
    diverged_C = ~np.isfinite(measures.test_loss_C)
    return diverged_C if measures.loss_C is None else diverged_C | np.isinf(measures.loss_C)


def _some(clients: NDArray[np.int64]) -> str:
    return ", ".join(map(str, clients[:8])) + (
        f" and {len(clients) - 8} more" if len(clients) > 8 else ""
    )


def plain(numbers: NDArray[np.float64]) -> Any:
    """As lists; what JSON has no number for becomes null; nine digits, which adding up in another order does not reach."""
    rounded = [float(f"{x:.9g}") if np.isfinite(x) else None for x in numbers.ravel()]
    return np.array(rounded, dtype=object).reshape(numbers.shape).tolist()


def summary(record: RunFolder, digests: list[str]) -> Json:
    """The end of a run, from its events."""
    events = list(record.events())
    rounds, final = [e for e in events if e["event"] == "round"], events[-1]
    before = next(e for e in reversed(rounds) if "accuracy" in e)
    about = record.read("run.json")
    return {
        "method": about["config"]["method"],
        "rounds": len(rounds),
        "accuracy": _spread(final),
        "accuracy_before_final_phase": _spread(before),
        "clients": {
            "accuracy": final["accuracy"],
            "test_loss": final["test_loss"],
            "mixture": final.get("mixture"),
        },
        "newcomers": None
        if "newcomers" not in final
        else {**final["newcomers"], "accuracy": _spread(final["newcomers"])},
        "purity": final.get("purity"),
        "consensus": final.get("consensus"),
        "models_sent": sum(len(t["models"]) for e in rounds for t in e["traffic"] if t["is_model"]),
        "bytes": {
            kind: sum(e["bytes"][kind] for e in rounds) for kind in ("multicast", "point_to_point")
        },
        "steps": sum(e["steps"] for e in [*rounds, final]),
        "seconds": round(sum(e["seconds"]["total"] for e in [*rounds, final]), 3),
        "alarms": final["alarms"],
        "hash": hashlib.sha256("".join(digests).encode()).hexdigest(),
    }


def _spread(event: Json) -> Json:
    scores = np.array(
        [np.nan if score is None else score for score in event["accuracy"]], dtype=float
    )
    return {name: plain(np.array(value)) for name, value in asdict(Spread.of(scores)).items()}
