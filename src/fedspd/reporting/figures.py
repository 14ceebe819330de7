"""Draw the figures of runs from plain numbers.

Accuracies and shares are fractions; values that are not finite are left out. Every function returns
a new matplotlib Figure and leaves pyplot's global state alone.

Shapes: R rounds, N clients, S clusters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import ArrayLike

from fedspd.core.scores import ACCURACY, Score
from fedspd.reporting.figure_style import (
    DRAWN_AT_MOST,
    GREY,
    SMALL_POINTS,
    TEXT_POINTS,
    Points,
    add_legend,
    cluster_name,
    dash,
    make_panels,
    point_marker,
    tick_rounds,
    tint,
)

Curve = tuple[Sequence[float], list[float], list[float] | None]  # x, mean, spread
Line = list[tuple[Any, float, float]]  # value, mean, half-width of its interval

OVER_SEEDS = "95 % interval over seeds"  # meaning of a band or a bar
OVER_CLIENTS = "standard deviation over clients"
BANDS = ((5, 95), (25, 75))  # percentiles
LEAST_ROOM = 5  # percentage points that a band may leave the means of all methods
MARKER_ROOM = 0.03  # of an axis, half the height of a marker in the smallest panel


# ---- accuracy


def draw_accuracy_by_round(
    curves: Mapping[str, Curve],
    final: Mapping[str, tuple[float, float]] | None = None,
    spread: str = OVER_SEEDS,
    score: Score = ACCURACY,
) -> Figure:
    """Draw a curve per method, and mean and spread after the final phase beside it.

    `spread` is the meaning of the bands.
    """
    figure, (axes,) = make_panels(f"{_capital(score.title)} by round")
    rounds = [round for curve in curves.values() for round in curve[0]]
    for i, (method, curve) in enumerate(curves.items()):
        draw_curve(axes, method, curve, i, _scale(score))
    if final and rounds:
        gap = 0.02 * max(max(rounds) - min(rounds), 1)
        for i, method in enumerate(curves):
            mean, half = final.get(method, (np.nan, np.nan))
            _draw_final(axes, max(rounds) + (i + 2) * gap, (mean, half), tint(i), score)
    _label_score(axes, "Round", score)
    means = [curve[1] for curve in curves.values()]
    if final:
        means.append([mean for mean, _ in final.values()])
    is_cut = _limit_bands(axes, means, score)
    tick_rounds(axes, rounds)
    handles = list(axes.get_legend_handles_labels()[0])
    if final:
        label = "after the final phase"
        handles.append(Line2D([], [], color=GREY, marker="D", ms=4, linestyle="", label=label))
    add_legend(figure, handles, _band_note(curves, spread, is_cut))
    return figure


def draw_accuracy_by_cost(
    title: str, panels: Mapping[str, Mapping[str, Curve]], score: Score = ACCURACY
) -> Figure:
    """Draw a panel per kind of cost, with a curve per method over the cost so far.

    A method without such a cost is a dot.
    """
    figure, all_axes = make_panels(f"{_capital(score.title)} by {title}", len(panels))
    for axes, (label, curves) in zip(all_axes, panels.items(), strict=True):
        for i, (method, (cost, mean, spread)) in enumerate(curves.items()):
            if cost[0] == cost[-1]:
                cost, mean, spread = cost[-1:], mean[-1:], spread and spread[-1:]
            draw_curve(axes, method, (cost, mean, spread), i, _scale(score))
        _label_score(axes, label, score)
        axes.label_outer()
    curves = next(iter(panels.values()))
    means = [curve[1] for curve in curves.values()]
    are_cut = [_limit_bands(axes, means, score) for axes in all_axes]
    handles = list(all_axes[0].get_legend_handles_labels()[0])
    add_legend(figure, handles, _band_note(curves, OVER_SEEDS, any(are_cut)))
    return figure


def _band_note(curves: Mapping[str, Curve], spread: str, is_cut: bool) -> str | None:
    has_band = any(curve[2] is not None for curve in curves.values())
    return f"band: {spread}{', cut at the edge' if is_cut else ''}" if has_band else None


def _limit_bands(axes: Axes, means: Sequence[Sequence[float]], score: Score) -> bool:
    """Cut bands far beyond all means at the edge, and return whether any was.

    The interval of two seeds is 13 standard errors wide to each side: it would fill the panel. The
    means take at least two thirds of the height.
    """
    mean = _scale(score) * np.array([value for own in means for value in own], dtype=float)
    mean = mean[np.isfinite(mean)]
    if not mean.size or not (np.ptp(mean) or score.is_percent):
        return False
    room = max(np.ptp(mean) / 4, LEAST_ROOM if score.is_percent else 0)
    low, high = mean.min() - room, mean.max() + room
    if low <= axes.dataLim.y0 and axes.dataLim.y1 <= high:
        return False
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(low, bottom), min(high, top))
    return True


def draw_accuracy_by_value(
    axis: str, panels: Mapping[str, Mapping[str, Line]], score: Score = ACCURACY
) -> Figure:
    """Draw a panel for each point of the other axes, with a labelled line per method."""
    figure, all_axes = make_panels(f"{_capital(score.title)} by {axis}", len(panels))
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    points = [point for lines in panels.values() for line in lines.values() for point in line]
    x_of = positions(list(dict.fromkeys(value for value, _, _ in points)))
    low, high = min(x_of.values()), max(x_of.values())
    gap = 0.015 * max(high - low, 1)  # shifts the lines, else the intervals hide each other
    margin = len(labels) * gap
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        for label, line in lines.items():
            i = labels.index(label)
            shift = (i - (len(labels) - 1) / 2) * gap
            drawn = [(x_of[value] + shift, *numbers) for value, *numbers in line]
            draw_line(axes, label, drawn, i, score)
        axes.set_xticks(list(x_of.values()), [str(value) for value in x_of])
        axes.set_xlim(low - margin, high + margin)
        axes.set_title(title.replace(", ", "\n"), fontsize=SMALL_POINTS)
        _label_score(axes, axis, score)
        axes.label_outer()
    handles: dict[str, Artist] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    note = f"bar: {OVER_SEEDS}" if any(half for _, _, half in points) else None
    add_legend(figure, [handles[label] for label in labels], note)
    return figure


def positions(values: Sequence[Any]) -> dict[Any, float]:
    """Return where each value stands: at itself if all are numbers, else in order."""
    is_numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return {value: float(value) if is_numeric else float(i) for i, value in enumerate(values)}


def draw_line(
    axes: Axes,
    label: str,
    line: Sequence[Sequence[float]],
    i: int,
    score: Score = ACCURACY,
    is_quoted: bool = False,
) -> None:
    """Draw a line with its error bars; one with another's values is dotted and has open markers."""
    x, mean, half = np.array(line).T
    error, scale = _bars(mean, half, score) if half.any() else None, _scale(score)
    style: dict[str, Any] = {"color": tint(i), "linestyle": dash(i), "marker": "o"}
    style |= {"linestyle": ":", "markerfacecolor": "white"} if is_quoted else {}
    size: dict[str, Any] = {"markersize": 4, "linewidth": 1.5, "capsize": 3}
    axes.errorbar(x, scale * mean, yerr=error, label=label, **style, **size)


def draw_curve(axes: Axes, method: str, curve: Curve, i: int, scale: float = 100) -> None:
    x, mean = np.asarray(curve[0], dtype=float), np.asarray(curve[1], dtype=float)
    known = np.isfinite(mean)
    x, mean = x[known], scale * mean[known]
    style: dict[str, Any] = {"color": tint(i), "linestyle": dash(i), "marker": point_marker(x)}
    axes.plot(x, mean, markersize=4, label=method, **style)
    if curve[2] is not None:
        spread = scale * np.nan_to_num(np.asarray(curve[2], dtype=float)[known])
        band: dict[str, Any] = {"color": tint(i), "alpha": 0.15, "linewidth": 0}
        low, high = np.maximum(mean - spread, np.minimum(mean, 0)), mean + spread
        if scale == 100:  # nothing is above 100 %
            high = np.minimum(high, np.maximum(mean, 100))
        axes.fill_between(x, low, high, **band)


def _bars(mean: Points, half: Points, score: Score) -> Points:
    """Return the lengths of error bars down and up: none leaves 0 to 100 %, or falls below 0."""
    scale = _scale(score)
    middle, error = scale * mean, scale * np.nan_to_num(half)
    above = np.minimum(error, 100 - middle) if score.is_percent else error
    return np.clip([np.minimum(error, middle), above], 0, None)


def _draw_final(
    axes: Axes, x: float, mean_half: tuple[float, float], colour: str, score: Score
) -> None:
    mean, half = mean_half
    if np.isfinite(mean):
        error = _bars(np.array([mean]), np.array([half]), score)
        style: dict[str, Any] = {"marker": "D", "markersize": 4, "linewidth": 1, "capsize": 2}
        axes.errorbar([x], [_scale(score) * mean], yerr=error, color=colour, **style)


def _label_score(axes: Axes, xlabel: str, score: Score) -> None:
    low, high = axes.get_ylim()
    limits = (max(low, 0), high)
    if score.is_percent:  # room for the marker of a score of 0 or 100 %
        room = MARKER_ROOM * (min(high, 100) - max(low, 0))
        limits = (max(low, -room), min(high, 100 + room))
    axes.set(xlabel=xlabel, ylabel=f"Test {score.heading}", ylim=limits)


def _scale(score: Score) -> float:
    return 100 if score.is_percent else 1


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]


def draw_client_boxes(
    scores_by_method: Mapping[str, Sequence[float]], score: Score = ACCURACY
) -> Figure:
    """Draw a box over the clients of each method, and every client as a point, if they are few.

    Of many clients, points at evenly spaced ranks are drawn.
    """
    figure, (axes,) = make_panels(f"{_capital(score.title)} of the clients")
    black = {"color": "black", "linewidth": 1.5}
    for i, scores in enumerate(scores_by_method.values()):
        score_N = _scale(score) * np.asarray(scores, dtype=float)
        score_N = score_N[np.isfinite(score_N)]
        shown = _sample_ranks(score_N)
        axes.scatter(i + jitter(len(shown)), shown, s=9, color=tint(i), alpha=0.6, linewidths=0)
        box: dict[str, Any] = {"widths": 0.45, "showfliers": False, "medianprops": black}
        axes.boxplot([score_N], positions=[i], zorder=3, **box)
    names = list(scores_by_method)
    is_crowded = sum(map(len, names)) > 40
    slant: dict[str, Any] = {"rotation": 25, "ha": "right"} if is_crowded else {}
    axes.set_xticks(range(len(names)), names, **slant)
    axes.set(ylabel=f"Test {score.heading}", xlim=(-0.6, max(len(names), 1) - 0.4))
    return figure


def _sample_ranks(value_N: Points) -> Points:
    """Return the values, or as many as can be drawn at evenly spaced ranks."""
    if len(value_N) <= DRAWN_AT_MOST:
        return value_N
    rank = np.linspace(0, len(value_N) - 1, DRAWN_AT_MOST).round().astype(int)
    return np.asarray(np.sort(value_N)[rank])


def jitter(n: int) -> Points:
    """Return n evenly spread offsets: multiples of the golden ratio, modulo 1."""
    return 0.3 * ((np.arange(n) * (5**0.5 - 1) / 2) % 1 - 0.5)


# ---- mixtures


def draw_mixtures_by_round(rounds: Sequence[int], mixtures_RNS: Sequence[ArrayLike]) -> Figure:
    """Draw a panel per cluster: its share at every client (thin) and their mean (thick).

    Of many clients, percentiles are drawn as bands.
    """
    share_RNS = np.asarray(mixtures_RNS, dtype=float)
    known_R = np.isfinite(share_RNS).any(axis=1).all(axis=1)
    round_R, share_RNS = np.asarray(rounds)[known_R], share_RNS[known_R]
    figure, panels = make_panels("Mixtures by round", share_RNS.shape[2])
    is_crowded = share_RNS.shape[1] > DRAWN_AT_MOST
    thick: dict[str, Any] = {"linewidth": 1.5, "marker": point_marker(round_R), "markersize": 4}
    for s, axes in enumerate(panels):
        share_RN = share_RNS[:, :, s]
        (_draw_bands if is_crowded else _draw_thin_lines)(axes, round_R, share_RN, tint(s))
        axes.plot(round_R, np.nanmean(share_RN, axis=1), color="black", **thick)
        axes.set(xlabel="Round", ylim=(-0.02, 1.02))
        axes.set_title(cluster_name(s), fontsize=TEXT_POINTS)
        tick_rounds(axes, round_R.tolist())
    figure.supylabel("Share of the examples", fontsize=TEXT_POINTS)
    clients: list[Artist] = [Line2D([], [], color=GREY, linewidth=0.6, label="a client")]
    if is_crowded:
        labels = [f"{high - low} % of the clients" for low, high in BANDS]
        clients = [
            Patch(color=GREY, alpha=0.3 * (i + 1), label=label) for i, label in enumerate(labels)
        ]
    add_legend(figure, [*clients, Line2D([], [], color="black", label="mean over clients")])
    return figure


def _draw_thin_lines(axes: Axes, round_R: Points, share_RN: Points, colour: str) -> None:
    style: dict[str, Any] = {"marker": point_marker(round_R), "markersize": 3}
    axes.plot(round_R, share_RN, color=colour, linewidth=0.6, alpha=0.5, **style)


def _draw_bands(axes: Axes, round_R: Points, share_RN: Points, colour: str) -> None:
    for low, high in BANDS:
        low_R, high_R = np.nanpercentile(share_RN, [low, high], axis=1)
        if len(round_R) == 1:  # a band has no width there
            axes.vlines(round_R, low_R, high_R, color=colour, alpha=0.3, linewidth=9)
        axes.fill_between(round_R, low_R, high_R, color=colour, alpha=0.3, linewidth=0)
