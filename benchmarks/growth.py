"""Processor time of a FedSPD round against clients, clusters, parameters and edges.

    python benchmarks/growth.py

Writes docs/images/growth.svg and prints its numbers. One property of the small network of
`fedspd bench` changes at a time; one worker trains.
"""

from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from fedspd.bench.rounds import small_network, time_rounds
from fedspd.reporting.figure_files import to_svg
from fedspd.reporting.figure_style import GREY, PALETTE, SMALL_POINTS, TEXT_POINTS, WIDTH_INCHES

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
    panels = zip(figure.subplots(2, 2).ravel(), AXES.items(), strict=True)
    for axes, (key, (label, values)) in panels:
        xs = [position(key, value) for value in values]
        measured = [measure({**USUAL, key: value}) for value in values]
        for x, (total, rest) in zip(xs, measured, strict=True):
            seconds = f"{total:9.4f} s {rest:9.4f} s without training and losses"
            print(f"{label:22} {x:9,} {seconds}", flush=True)
        draw(axes, label, xs, measured)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, ncols=3, loc="outside lower center", fontsize=SMALL_POINTS, frameon=False
    )
    PICTURE.write_bytes(to_svg(figure))


def measure(changed: dict[str, int]) -> tuple[float, float]:
    """Return the processor seconds of a round, and those besides training and losses.

    The latter are spent on the exchange, on averaging and on records.
    """
    rounds = time_rounds(*small_network(**changed), TURNS)
    total = median(timed.processor for timed in rounds)
    return total, total * median(1 - timed.passes / timed.seconds for timed in rounds)


def position(key: str, value: int) -> int:
    """Return the value's position on its axis."""
    if key == "hidden":
        return 64 * value + value + value * 10 + 10
    return USUAL["clients"] * value // 2 if key == "degree" else value


def draw(axes: Axes, label: str, xs: list[int], measured: list[tuple[float, float]]) -> None:
    total, rest = zip(*measured, strict=True)
    style: dict[str, Any] = {"marker": "o", "markersize": 3}
    axes.loglog(xs, total, color=PALETTE[0], label="complete round", **style)
    axes.loglog(xs, rest, color=PALETTE[1], label="without training and losses", **style)
    line = [total[-1] * x / xs[-1] for x in xs]
    axes.loglog(xs, line, color=GREY, linestyle=":", label="proportional growth")
    axes.set_xticks(xs, [f"{x:,}" for x in xs])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(min(rest) / 2, max(total) * 2)
    axes.set_xlabel(label, fontsize=TEXT_POINTS)
    axes.set_ylabel("processor seconds", fontsize=TEXT_POINTS)
    axes.tick_params(labelsize=SMALL_POINTS, which="both")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
