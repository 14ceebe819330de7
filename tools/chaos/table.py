"""Write chaos.json as the table of docs/reliability.md."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from chaos.fleet import Json

BEGIN, END = "<!-- table: written by make chaos -->\n", "<!-- end of the table -->"
HEAD = (
    "fault",
    "detected after (s)",
    "recovered after (s)",
    "recovered in (rounds)",
    "missing answers (%)",
    "time per round (s)",
    "traffic (MB)",
    "accuracy loss (pp)",
)


def insert(page: Path, rows: Sequence[Json]) -> None:
    """Replace the table of the page."""
    replace(page, render(rows))


def replace(page: Path, text: str) -> None:
    """Replace the text between the marks of a page."""
    pattern = f"(?s){re.escape(BEGIN)}.*{re.escape(END)}"
    page.write_text(re.sub(pattern, lambda _: BEGIN + text + END, page.read_text()))


def render(rows: Sequence[Json]) -> str:
    """Return the table as Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *(_row(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(row: Json) -> list[str]:
    calm, faults = row["undisturbed"], row["faults"]
    return [
        row["title"],
        _median_and_maximum(faults, "noticed"),
        _median_and_maximum(faults, "healed"),
        _median_and_maximum(faults, "rounds"),
        f"{row['left_out']:.1f}",
        f"{row['seconds_per_round']:.2f} ({calm['seconds_per_round']:.2f})",
        f"{row['bytes'] / 1e6:.1f} ({calm['bytes'] / 1e6:.1f})",
        f"{calm['accuracy'] - row['accuracy']:.1f} ({calm['accuracy']:.1f} %)",
    ]


def _median_and_maximum(faults: Sequence[Json], key: str) -> str:
    """Return the median and the maximum, or the only number."""
    if not faults:
        return "–"
    found = [fault[key] for fault in faults if fault[key] is not None]
    if not found:
        return "never"
    maximum = f", max {max(found):g}" if len(found) > 1 else ""
    return f"{round(median(found), 1):g}{maximum}"
