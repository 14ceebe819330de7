"""Parts of all figures: colours, sizes, panels, ticks and legends."""

import io
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

Points = NDArray[np.float64]

# Okabe and Ito's colours are distinct for colour-blind readers; yellow, the palest, comes last.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
DASHES = ("-", "--", "-.", ":")
DARK, GREY, PALE = "#555555", "#999999", "#BBBBBB"
WIDTH_INCHES = 5.0  # a column of a paper
TEXT_POINTS, SMALL_POINTS = 9, 8
TITLE_LETTERS = 70  # in one line
LEGEND_LETTERS = 84  # in one line
SAMPLE_LETTERS = 6  # width of the sample before each entry of the legend
SHOWN_DPI = 110  # in a notebook
DRAWN_AT_MOST = 300  # clients; of more, distributions are drawn


class ShownFigure(Figure):
    """A figure that a notebook shows; of others it does so only once pyplot was imported."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=SHOWN_DPI)
        return content.getvalue()


def make_panels(title: str, count: int = 1, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    """Return a column-wide figure with its panels, two or three in a row."""
    columns = min(count, 2 if count == 4 else 3)
    rows = -(-count // columns)
    figure = ShownFigure(figsize=(WIDTH_INCHES, 1.0 + 2.0 * max(rows, 1.2)), layout="constrained")
    figure.suptitle(textwrap.fill(title, TITLE_LETTERS), fontsize=TEXT_POINTS)
    panels = figure.subplots(rows, columns, sharey=sharey, squeeze=False).ravel().tolist()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=SMALL_POINTS)
        axes.xaxis.label.set_size(TEXT_POINTS)
        axes.yaxis.label.set_size(TEXT_POINTS)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def tick_rounds(axes: Axes, rounds: Sequence[float]) -> None:
    """Put ticks at integer rounds only, none of them after the last round."""
    if rounds:
        ticks = MaxNLocator(nbins=6, integer=True).tick_values(min(rounds), max(rounds))
        axes.set_xticks([tick for tick in ticks if min(rounds) <= tick <= max(rounds)])
    if len(set(rounds)) == 1:
        axes.set_xlim(rounds[0] - 0.5, rounds[0] + 0.5)


def add_legend(figure: Figure, handles: list[Artist], title: str | None = None) -> None:
    """Add a legend below the panels, where it hides nothing."""
    if handles:
        longest = max(len(str(handle.get_label())) for handle in handles)
        rows = -(-len(handles) // max(1, min(4, LEGEND_LETTERS // (longest + SAMPLE_LETTERS))))
        columns = -(-len(handles) // rows)
        style: dict[str, Any] = {
            "fontsize": SMALL_POINTS,
            "title_fontsize": SMALL_POINTS,
            "frameon": False,
        }
        place: dict[str, Any] = {"ncols": columns, "loc": "outside lower center"}
        figure.legend(handles=handles, title=title, **place, **style)


def point_marker(rounds: Points) -> str | None:
    """Return a marker for a single point, which is invisible as a line."""
    return "o" if len(rounds) == 1 else None


def tint(i: int) -> str:
    """Return the colour of method or cluster i."""
    return PALETTE[i % len(PALETTE)]


def dash(i: int) -> str:
    """Return the line style of method i."""
    return DASHES[(i + i // len(PALETTE)) % len(DASHES)]


def cluster_name(s: int) -> str:
    """Return the label of a cluster."""
    return f"cluster {s}"
