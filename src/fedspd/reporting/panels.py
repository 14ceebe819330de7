"""Figures of several panels: curves, lines and boxes, one panel for each dataset or graph."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedspd.reporting.figure_style import (
    SMALL_POINTS,
    TEXT_POINTS,
    add_legend,
    make_panels,
    tick_rounds,
    tint,
)
from fedspd.reporting.figures import (
    Curve,
    Line,
    draw_curve,
    draw_line,
    jitter,
    positions,
)

MOST_TICKS = 8  # beside each other; of more numbers, some have one
LEAST_POINTS = 4.0  # that an axis spans: chance should not look like a finding


def draw_curves(
    title: str,
    shown: Mapping[str, Mapping[str, Curve]],
    ylabel: str,
    labels: Sequence[str],
    spread: str,
) -> Figure:
    """Draw a panel per row with a curve per label, by round; the labels' order gives colours.

    `spread` is the meaning of the bands.
    """
    figure, all_axes = make_panels(title, len(shown))
    for axes, (name, curves) in zip(all_axes, shown.items(), strict=True):
        for label, curve in curves.items():
            draw_curve(axes, label, curve, labels.index(label))
        tick_rounds(axes, [round for curve in curves.values() for round in curve[0]])
        _name(axes, name, "Round", ylabel)
    has_band = any(curve[2] for curves in shown.values() for curve in curves.values())
    _shared_legend(figure, all_axes, f"band: {spread}" if has_band else None, labels)
    return figure


def draw_lines(
    title: str,
    xlabel: str,
    shown: Mapping[str, Mapping[str, Line]],
    ylabel: str,
    spread: str,
    quoted: Mapping[str, str],
) -> Figure:
    """Draw a panel per row with a line per label, over the values of an axis.

    spread   the meaning of the bars
    quoted   the labels of lines with another's values, to the label whose colour they have
    """
    figure, all_axes = make_panels(title, len(shown), sharey=len(shown) == 1)
    labels = list(dict.fromkeys(label for lines in shown.values() for label in lines))
    own = [label for label in labels if label not in quoted]
    values = [value for lines in shown.values() for line in lines.values() for value, *_ in line]
    x_of = positions(list(dict.fromkeys(values)))
    for axes, (name, lines) in zip(all_axes, shown.items(), strict=True):
        for label, line in lines.items():
            points = [(x_of[value], *score) for value, *score in line]
            i = own.index(quoted.get(label, label))
            draw_line(axes, label, points, i, is_quoted=label in quoted)
        if len(x_of) > MOST_TICKS and all(isinstance(value, float) for value in x_of):
            tick_rounds(axes, list(x_of.values()))
        else:
            axes.set_xticks(list(x_of.values()), [_tick(value) for value in x_of])
        low, high = axes.get_ylim()
        missing = max(0.0, LEAST_POINTS - (high - low)) / 2
        axes.set_ylim(low - missing, high + missing)
        _name(axes, name, xlabel, ylabel)
    has_bar = any(half for lines in shown.values() for line in lines.values() for *_, half in line)
    _shared_legend(figure, all_axes, f"bar: {spread}" if has_bar else None, labels)
    return figure


def draw_boxes(title: str, shown: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Figure:
    """Draw a panel per row with a box over the clients per label."""
    figure, all_axes = make_panels(title, len(shown))
    black: dict[str, Any] = {"medianprops": {"color": "black"}, "showfliers": False}
    for axes, (name, boxes) in zip(all_axes, shown.items(), strict=True):
        for i, scores in enumerate(boxes.values()):
            known = 100 * np.array([score for score in scores if score is not None])
            dots: dict[str, Any] = {"s": 6, "alpha": 0.5, "linewidths": 0}
            axes.scatter(i + jitter(len(known)), known, color=tint(i), **dots)
            axes.boxplot([known], positions=[i], widths=0.5, zorder=3, **black)
        slant: dict[str, Any] = {"rotation": 90} if len(boxes) > 4 or len(shown) > 1 else {}
        axes.set_xticks(range(len(boxes)), list(boxes), **slant)
        _name(axes, name, "", "Test accuracy (%)")
    return figure


def _tick(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _name(axes: Axes, name: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(name, fontsize=SMALL_POINTS)
    axes.set_xlabel(xlabel, fontsize=TEXT_POINTS)
    place = axes.get_subplotspec()
    if place is None or place.is_first_col():
        axes.set_ylabel(ylabel, fontsize=TEXT_POINTS)


def _shared_legend(
    figure: Figure, all_axes: Sequence[Axes], note: str | None, labels: Sequence[str]
) -> None:
    handles: dict[str, Artist] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    add_legend(figure, [handles[label] for label in labels if label in handles], note)
