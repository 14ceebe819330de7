"""Write the tables of docs/results.md from experiments/map/*.json.

    python experiments/map_tables.py

A table stands between the lines `<!-- map: PART -->` and `<!-- end -->`. Each world has the
seeds that all methods have run in.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedspd.reporting.statistics import Interval, paired_difference

Record = dict[str, Any]
Scores = dict[int, float | None]  # accuracy by seed
ROOT = Path(__file__).parents[1]
OURS = "fedspd-split"
HEADS = {
    "fedspd-split": "**Split**",
    "fedavg": "FedAvg",
    "fedavg, fine-tuned": "fine-tuned",
    "fedavg, half-way": "half-way",
    "fedavg, head x 2": "head x 2",
    "fedem": "FedEM",
    "ifca": "IFCA",
    "fedsoft": "FedSoft",
    "pfedme": "pFedMe",
    "facade": "FACADE",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "fedspd": "FedSPD",
    "fedspd, label-adjusted": "FedSPD, adjusted",
    "local": "local",
}


def table(records: Sequence[Record]) -> str:
    """Return one table: a row for every world, a column for every method."""
    methods = [row for row in HEADS if any(record["method"] == row for record in records)]
    worlds = list(dict.fromkeys(record["world"] for record in records))
    heads = [HEADS[row] for row in methods]
    lines = [
        "| " + " | ".join(["world", *heads, "Split against the best rival"]) + " |",
        "|---|" + "--:|" * (len(methods) + 1),
    ]
    for world in worlds:
        scores = {row: scores_of(records, world, row) for row in methods}
        lines.append("| " + " | ".join([world, *cells(scores, records, world)]) + " |")
    return "\n".join(lines)


def scores_of(records: Iterable[Record], world: str, method: str) -> Scores:
    """Return the accuracy of a method in a world, by seed."""
    return {
        record["seed"]: record["accuracy"]
        for record in records
        if record["world"] == world and record["method"] == method
    }


def cells(scores: dict[str, Scores], records: Sequence[Record], world: str) -> list[str]:
    """Return the accuracies, the highest in bold, and the difference to the best rival."""
    means = {row: mean(own) for row, own in scores.items()}
    known = {row: value for row, value in means.items() if value is not None}
    best = max(known, key=lambda row: round(known[row], 1), default=None)
    shown = [f"{known[row]:.1f}" if row in known else "" for row in means]
    shown = [f"**{text}**" if row == best else text for row, text in zip(means, shown, strict=True)]
    if OURS in known:
        shown[list(means).index(OURS)] += found(records, world)
    rivals = [row for row in known if row != OURS]
    if OURS not in known or not rivals:
        return [*shown, ""]
    rival = max(rivals, key=lambda row: known[row])
    return [*shown, describe(paired_difference(scores[OURS], scores[rival]))]


def mean(scores: Scores) -> float | None:
    """Return the mean over the seeds that are there."""
    known = [score for score in scores.values() if score is not None]
    return sum(known) / len(known) if known else None


def found(records: Iterable[Record], world: str) -> str:
    """Return the purity of the split and the numbers of clusters that it found."""
    own = [r for r in records if r["world"] == world and r["method"] == OURS]
    numbers = sorted({record["clusters"] for record in own})
    clusters = "S = " + ", ".join(map(str, numbers))
    purities = [record["purity"] for record in own if record["purity"] is not None]
    if not purities or numbers == [1]:
        return f" ({clusters})"
    return f" ({sum(purities) / len(purities):.2f}, {clusters})"


def describe(difference: Interval) -> str:
    """Return a difference with its interval, which one seed does not have."""
    if difference.mean is None:
        return ""
    text = f"{difference.mean:+.1f}".replace("-", "−")
    return text if difference.half is None else f"{text} ± {difference.half:.1f}"


def tables(part: str, records: Sequence[Record]) -> str:
    """Return the tables of a part, one for every dataset, graph and amount of data."""
    keys = list(dict.fromkeys(place(record) for record in records))
    methods = {record["method"] for record in records}
    texts = []
    for key in keys:
        own = complete([record for record in records if place(record) == key], len(methods))
        if not own:
            continue
        data, clients, examples, degree = key
        title = f"{data}, {clients} clients x {examples} examples, degree {degree}"
        texts.append(f"**{title}** ({seeds_in_words(own)})\n\n{table(own)}")
    return "\n\n".join(texts)


def seeds_in_words(records: Iterable[Record]) -> str:
    """Return how many seeds the rows of a table have."""
    cells = {(record["seed"], record["world"]) for record in records}
    counts = Counter(world for _, world in cells).values()
    least, most = min(counts), max(counts)
    if least == most:
        return f"{most} seed{'s' if most > 1 else ''}"
    return f"{most} seeds; {least} where the interval is {'missing' if least == 1 else 'wider'}"


def complete(records: Sequence[Record], methods: int) -> list[Record]:
    """Return the runs of the worlds and seeds in which every method has run."""
    count = Counter((record["seed"], record["world"]) for record in records)
    return [r for r in records if count[r["seed"], r["world"]] == methods]


def place(record: Record) -> tuple[str, int, int, int]:
    """Return what one table has in common."""
    return record["data"], record["clients"], record["examples"], record["degree"]


def chosen(records: Sequence[Record]) -> str:
    """Return the table of the options that were best on the held-out seed."""
    datasets = list(dict.fromkeys(record["data"] for record in records))
    heads = " | ".join(f"{data}: chosen | mean (%)" for data in datasets)
    lines = [f"| method | {heads} |", "|---|" + "---|--:|" * len(datasets)]
    for method, head in HEADS.items():
        cells = [
            best_options([r for r in records if (r["method"], r["data"]) == (method, data)])
            for data in datasets
        ]
        lines.append(f"| {head} | {' | '.join(cells)} |")
    return "\n".join(lines)


def best_options(records: Sequence[Record]) -> str:
    """Return the options with the highest mean, and that mean, as two cells."""
    sums: dict[str, list[float]] = {}
    for record in records:
        sums.setdefault(json.dumps(record["options"]), []).append(record["accuracy"])
    if not sums:
        return " | "
    best = max(sums, key=lambda options: sum(sums[options]))
    tables = json.loads(best).items()
    words = [f"{key} = {value}" for _, table in tables for key, value in table.items()]
    return f"{', '.join(words)} | {sum(sums[best]) / len(sums[best]):.1f}"


def main(page: Path = ROOT / "docs/results.md", folder: Path = ROOT / "experiments/map") -> None:
    """Replace the tables of the page."""
    text = page.read_text()
    for part in re.findall(r"<!-- map: (\w+) -->", text):
        path = folder / f"{part}.json"
        records = json.loads(path.read_text()) if path.exists() else []
        body = chosen(records) if part == "tune" else tables(part, records)
        start, rest = text.split(f"<!-- map: {part} -->\n", 1)
        _, end = rest.split("<!-- end -->", 1)
        filled = f"\n{body}\n\n" if records else "\n"
        text = f"{start}<!-- map: {part} -->\n{filled}<!-- end -->{end}"
    page.write_text(text)


if __name__ == "__main__":
    main()
