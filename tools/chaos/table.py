"""chaos.json as the table of docs/reliability.md."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from chaos.fleet import Json

BEGIN, END = "<!-- table: written by make chaos -->\n", "<!-- end of the table -->"
HEAD = (
    "fault",
    "noticed after",
    "heard again after",
    "in rounds",
    "answers left out",
    "s per round",
    "bytes",
    "accuracy lost",
)


def insert(page: Path, rows: Sequence[Json]) -> None:
    text = page.read_text()
    page.write_text(
        re.sub(
            f"(?s){re.escape(BEGIN)}.*{re.escape(END)}", lambda _: BEGIN + render(rows) + END, text
        )
    )


def render(rows: Sequence[Json]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *(_row(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(row: Json) -> list[str]:
    calm, faults = row["undisturbed"], row["faults"]
    return [
        row["title"],
        _range(faults, "noticed", " s"),
        _range(faults, "healed", " s"),
        _range(faults, "rounds", ""),
        f"{row['left_out']:.1f} %",
        f"{row['seconds_per_round']:.2f} ({calm['seconds_per_round']:.2f})",
        f"{row['bytes'] / 1e6:.1f} MB ({100 * (row['bytes'] / calm['bytes'] - 1):+.1f} %)",
        f"{calm['accuracy'] - row['accuracy']:.1f} points of {calm['accuracy']:.1f} %",
    ]


def _range(faults: Sequence[Json], key: str, unit: str) -> str:
    """The median and the largest; one number where there is one."""
    if not faults:
        return "–"
    found = [fault[key] for fault in faults if fault[key] is not None]
    if not found:
        return "not at all"
    largest = f", at most {max(found):g}{unit}" if len(found) > 1 else ""
    return f"{round(median(found), 1):g}{unit}{largest}"
