"""Processor seconds of a FedSPD round against clients, clusters, parameters and edges: docs/images/growth.svg and the numbers in it.

    python benchmarks/growth.py

A small network of `fedspd bench` is changed in one way at a time. One worker.
"""

from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from fedspd.bench.rounds import small_network, timed_rounds
from fedspd.reporting.figures import GREY, PALETTE, SMALL_POINTS, TEXT_POINTS, WIDTH_INCHES, to_svg

PICTURE = Path(__file__).parents[1] / "docs/images/growth.svg"
TURNS = 5
USUAL = {"clients": 200, "clusters": 2, "hidden": 26, "degree": 6}
AXES: dict[str, tuple[str, list[int]]] = {
    "clients": ("clients", [20, 63, 200, 632, 2000]),
    "clusters": ("clusters", [1, 2, 4, 8]),
    "hidden": ("parameters of a model", [26, 104, 416, 1664]),
    "degree": ("edges", [2, 6, 18, 54]),
}


def main() -> None:
    figure = Figure(figsize=(WIDTH_INCHES * 1.4, 5.0), layout="constrained")
    for axes, (key, (label, values)) in zip(
        figure.subplots(2, 2).ravel(), AXES.items(), strict=True
    ):
        found = [measure({**USUAL, key: value}) for value in values]
        places = [place(key, value) for value in values]
        for x, (whole, rest) in zip(places, found, strict=True):
            print(
                f"{label:22} {x:9,} {whole:9.4f} s {rest:9.4f} s without training and losses",
                flush=True,
            )
        draw(axes, label, places, found)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, ncols=3, loc="outside lower center", fontsize=SMALL_POINTS, frameon=False
    )
    PICTURE.write_bytes(to_svg(figure))


def measure(changed: dict[str, int]) -> tuple[float, float]:
    """Seconds of the processor for a round, and for what of it is neither training nor losses: exchange, averaging, records."""
    rounds = timed_rounds(*small_network(**changed), TURNS)
    whole = median(timed.processor for timed in rounds)
    return whole, whole * median(1 - timed.passes / timed.seconds for timed in rounds)


def place(key: str, value: int) -> int:
    """Where a value stands on its axis."""
    if key == "hidden":
        return 64 * value + value + value * 10 + 10
    return USUAL["clients"] * value // 2 if key == "degree" else value


def draw(axes: Axes, label: str, places: list[int], found: list[tuple[float, float]]) -> None:
    whole, rest = zip(*found, strict=True)
    style: dict[str, Any] = {"marker": "o", "markersize": 3}
    axes.loglog(places, whole, color=PALETTE[0], label="whole round", **style)
    axes.loglog(places, rest, color=PALETTE[1], label="without training and losses", **style)
    line = [whole[-1] * x / places[-1] for x in places]
    axes.loglog(places, line, color=GREY, linestyle=":", label="in proportion")
    axes.set_xticks(places, [f"{x:,}" for x in places])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(min(rest) / 2, max(whole) * 2)
    axes.set_xlabel(label, fontsize=TEXT_POINTS)
    axes.set_ylabel("processor seconds", fontsize=TEXT_POINTS)
    axes.tick_params(labelsize=SMALL_POINTS, which="both")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
