"""What a run had reached after every round, and what it had cost until then."""

from html import escape
from typing import Any

import numpy as np

from fedspd.core.errors import ConfigError, MissingExtraError
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder


def history(run_folder: RunFolder) -> list[Json]:
    """Return an entry for every evaluated round, and for the final phase.

    Sums over all rounds so far: `bytes` (point-to-point), `seconds` (without tests) and `steps`.
    """
    entries, sent, seconds, steps = [], 0, 0.0, 0
    for event in run_folder.events():
        sent += event["bytes"]["point_to_point"]
        seconds += event["seconds"]["total"]
        steps += event["steps"]
        if "accuracy" in event:
            entry: Json = {"event": event["event"], "round": event["round"]}
            entry |= {name: _mean(event[name]) for name in ("accuracy", "test_loss")}
            entries.append({**entry, "bytes": sent, "seconds": seconds, "steps": steps})
    return entries


def _mean(scores: list[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return float(np.mean(known)) if known else None


def reach(entries: list[Json], accuracy: float) -> Json | None:
    """Return the first entry with at least this mean accuracy; None: there is none."""
    if not isinstance(accuracy, int | float | np.number) or isinstance(accuracy, bool):
        raise ConfigError(f"accuracy = {accuracy!r}: expected a number, such as 0.9.")
    return next((e for e in entries if (e["accuracy"] or 0.0) >= accuracy), None)


def overview(summary: Json) -> Json:
    """Return one line about a finished run, from its result.json."""
    accuracy = summary["accuracy"]
    return {
        "method": summary["method"],
        "rounds": summary["rounds"],
        "accuracy": accuracy["mean"],
        "worst 10 %": accuracy["worst"],
        **{name: spread["mean"] for name, spread in (summary.get("metrics") or {}).items()},
        "MB p2p": summary["bytes"]["point_to_point"] / 1e6,
        "time (s)": summary["seconds"],
    }


def as_frame(rows: list[Json]) -> Any:
    """Return the rows as a pandas DataFrame."""
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("A DataFrame needs pandas: pip install pandas.") from None
    return pandas.DataFrame(rows)


def html_table(rows: list[Json], caption: str) -> str:
    """Return the rows as a table for a notebook."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = ("".join(f"<td>{escape(_cell(row.get(name)))}</td>" for name in names) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
