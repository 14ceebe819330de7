"""Results as rows of a table, for notebooks and pandas."""

from html import escape
from typing import Any

from fedspd.core.errors import MissingExtraError
from fedspd.core.scores import ACCURACY, main_score
from fedspd.storage.atomic import Json


def overview(summary: Json) -> Json:
    """Return one line about a finished run, from its result.json."""
    score, metrics = main_score(summary["clients"]), summary.get("metrics") or {}
    main = summary["accuracy"] if score == ACCURACY else metrics.get(score.name) or {}
    others = {name: spread["mean"] for name, spread in metrics.items() if name != score.name}
    return {
        "method": summary["method"],
        "rounds": summary["rounds"],
        score.title: main.get("mean"),
        "worst 10 %": main.get("worst"),
        **others,
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
