"""Draw the figures of runs from plain numbers.

Accuracies and shares are fractions; values that are not finite are left out. Every function returns
a new matplotlib Figure and leaves pyplot's global state alone.

Shapes: R rounds, N clients, S clusters, 2 coordinates.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Patch, Wedge
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

Curve = tuple[Sequence[float], list[float], list[float] | None]  # x, mean, spread
Line = list[tuple[Any, float, float]]  # value, mean, half-width of its interval
Points = NDArray[np.float64]

# Okabe and Ito's colours are distinct for colour-blind readers; yellow, the palest, comes last.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
DASHES = ("-", "--", "-.", ":")
GREY, PALE = "#999999", "#BBBBBB"
WIDTH_INCHES = 5.0  # a column of a paper
TEXT_POINTS, SMALL_POINTS = 9, 8
LEGEND_LETTERS = 84  # in one line
SAMPLE_LETTERS = 6  # width of the sample before each entry of the legend
OVER_SEEDS = "95 % interval over seeds"  # meaning of a band or a bar
OVER_CLIENTS = "standard deviation over clients"
EDGE = 1.15  # layouts fill the square from -1 to 1

SEPARATION_STEPS = 50
LEAST_ASPECT = 0.3  # of a layout that is stretched to a square
LEAST_SHARE = 0.005  # of a mixture that is drawn
NUMBERED_AT_MOST = 60  # clients; the numbers of more hide each other
DRAWN_AT_MOST = 300  # clients; of more, distributions are drawn
SHARE_BINS = [i / 20 for i in range(21)]
DEGREE_BINS = 30  # at most
BANDS = ((5, 95), (25, 75))  # percentiles
KAMADA_KAWAI_AT_MOST = 100  # clients; its time is cubic in their number


# ---- accuracy


def draw_accuracy_by_round(
    curves: Mapping[str, Curve],
    final: Mapping[str, tuple[float, float]] | None = None,
    spread: str = OVER_SEEDS,
) -> Figure:
    """Draw a curve per method, and mean and spread after the final phase beside it.

    `spread` is the meaning of the bands.
    """
    figure, (axes,) = make_panels("Accuracy by round")
    rounds = [round for curve in curves.values() for round in curve[0]]
    for i, (method, curve) in enumerate(curves.items()):
        draw_curve(axes, method, curve, i)
    if final and rounds:
        gap = 0.02 * max(max(rounds) - min(rounds), 1)
        for i, method in enumerate(curves):
            mean, half = final.get(method, (np.nan, np.nan))
            _draw_final(axes, max(rounds) + (i + 2) * gap, mean, half, tint(i))
    _label_accuracy(axes, "Round")
    tick_rounds(axes, rounds)
    handles = list(axes.get_legend_handles_labels()[0])
    if final:
        label = "after the final phase"
        handles.append(Line2D([], [], color=GREY, marker="D", ms=4, linestyle="", label=label))
    add_legend(figure, handles, _band_note(curves, spread))
    return figure


def draw_accuracy_by_bytes(curves: Mapping[str, Curve]) -> Figure:
    """Draw a curve per method over the bytes sent so far, or a dot if the method sends nothing."""
    figure, (axes,) = make_panels("Accuracy by bytes sent, point-to-point")
    for i, (method, (sent, mean, spread)) in enumerate(curves.items()):
        if sent[0] == sent[-1]:
            sent, mean, spread = sent[-1:], mean[-1:], spread and spread[-1:]
        draw_curve(axes, method, ([count / 1e6 for count in sent], mean, spread), i)
    _label_accuracy(axes, "Megabytes sent by all clients")
    handles = list(axes.get_legend_handles_labels()[0])
    add_legend(figure, handles, _band_note(curves, OVER_SEEDS))
    return figure


def _band_note(curves: Mapping[str, Curve], spread: str) -> str | None:
    has_band = any(curve[2] is not None for curve in curves.values())
    return f"band: {spread}" if has_band else None


def draw_accuracy_by_value(axis: str, panels: Mapping[str, Mapping[str, Line]]) -> Figure:
    """Draw a panel for each point of the other axes, with a labelled line per method."""
    figure, all_axes = make_panels(f"Accuracy by {axis}", len(panels))
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
            draw_line(axes, label, [(x_of[value] + shift, *score) for value, *score in line], i)
        axes.set_xticks(list(x_of.values()), [str(value) for value in x_of])
        axes.set_xlim(low - margin, high + margin)
        axes.set_title(title.replace(", ", "\n"), fontsize=SMALL_POINTS)
        _label_accuracy(axes, axis)
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


def draw_line(axes: Axes, label: str, line: Sequence[Sequence[float]], i: int) -> None:
    x, mean, half = np.array(line).T
    error = _bars(mean, half)
    style: dict[str, Any] = {"color": tint(i), "linestyle": _dash(i), "marker": "o"}
    size: dict[str, Any] = {"markersize": 4, "linewidth": 1.5, "capsize": 3}
    axes.errorbar(x, 100 * mean, yerr=error, label=label, **style, **size)


def draw_curve(axes: Axes, method: str, curve: Curve, i: int) -> None:
    x, mean = np.asarray(curve[0], dtype=float), np.asarray(curve[1], dtype=float)
    known = np.isfinite(mean)
    x, mean = x[known], 100 * mean[known]
    style: dict[str, Any] = {"color": tint(i), "linestyle": _dash(i), "marker": _marker(x)}
    axes.plot(x, mean, markersize=4, label=method, **style)
    if curve[2] is not None:
        spread = 100 * np.nan_to_num(np.asarray(curve[2], dtype=float)[known])
        band: dict[str, Any] = {"color": tint(i), "alpha": 0.15, "linewidth": 0}
        axes.fill_between(x, mean - spread, mean + spread, **band)


def _bars(mean: Points, half: Points) -> Points:
    """Return the lengths of error bars down and up, in per cent: none leaves 0 to 100."""
    percent, error = 100 * mean, 100 * np.nan_to_num(half)
    return np.clip([np.minimum(error, percent), np.minimum(error, 100 - percent)], 0, None)


def _draw_final(axes: Axes, x: float, mean: float, half: float, colour: str) -> None:
    if np.isfinite(mean):
        error = _bars(np.array([mean]), np.array([half]))
        style: dict[str, Any] = {"marker": "D", "markersize": 4, "linewidth": 1, "capsize": 2}
        axes.errorbar([x], [100 * mean], yerr=error, color=colour, **style)


def _label_accuracy(axes: Axes, xlabel: str) -> None:
    low, high = axes.get_ylim()
    axes.set(xlabel=xlabel, ylabel="Test accuracy (%)", ylim=(max(low, -1), min(high, 101)))


def draw_client_boxes(accuracy: Mapping[str, Sequence[float]]) -> Figure:
    """Draw a box over the clients of each method, and every client as a point, if they are few.

    Of many clients, points at evenly spaced ranks are drawn.
    """
    figure, (axes,) = make_panels("Accuracy of the clients")
    black = {"color": "black", "linewidth": 1.5}
    for i, scores in enumerate(accuracy.values()):
        percent_N = 100 * np.asarray(scores, dtype=float)
        percent_N = percent_N[np.isfinite(percent_N)]
        shown = _sample_ranks(percent_N)
        axes.scatter(i + jitter(len(shown)), shown, s=9, color=tint(i), alpha=0.6, linewidths=0)
        box: dict[str, Any] = {"widths": 0.45, "showfliers": False, "medianprops": black}
        axes.boxplot([percent_N], positions=[i], zorder=3, **box)
    is_crowded = sum(len(method) for method in accuracy) > 40
    slant: dict[str, Any] = {"rotation": 25, "ha": "right"} if is_crowded else {}
    axes.set_xticks(range(len(accuracy)), list(accuracy), **slant)
    axes.set(ylabel="Test accuracy (%)", xlim=(-0.6, max(len(accuracy), 1) - 0.4))
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


# ---- mixtures and graph


def draw_mixtures_by_round(
    rounds: Sequence[int], mixtures_RNS: Sequence[Sequence[Sequence[float]]]
) -> Figure:
    """Draw a panel per cluster: its share at every client (thin) and their mean (thick).

    Of many clients, percentiles are drawn as bands.
    """
    share_RNS = np.asarray(mixtures_RNS, dtype=float)
    known_R = np.isfinite(share_RNS).any(axis=1).all(axis=1)
    round_R, share_RNS = np.asarray(rounds)[known_R], share_RNS[known_R]
    figure, panels = make_panels("Mixtures by round", share_RNS.shape[2])
    is_crowded = share_RNS.shape[1] > DRAWN_AT_MOST
    thick: dict[str, Any] = {"linewidth": 1.5, "marker": _marker(round_R), "markersize": 4}
    for s, axes in enumerate(panels):
        share_RN = share_RNS[:, :, s]
        (_draw_bands if is_crowded else _draw_thin_lines)(axes, round_R, share_RN, tint(s))
        axes.plot(round_R, np.nanmean(share_RN, axis=1), color="black", **thick)
        axes.set(xlabel="Round", ylim=(-0.02, 1.02))
        axes.set_title(_cluster(s), fontsize=TEXT_POINTS)
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
    style: dict[str, Any] = {"marker": _marker(round_R), "markersize": 3}
    axes.plot(round_R, share_RN, color=colour, linewidth=0.6, alpha=0.5, **style)


def _draw_bands(axes: Axes, round_R: Points, share_RN: Points, colour: str) -> None:
    for low, high in BANDS:
        low_R, high_R = np.nanpercentile(share_RN, [low, high], axis=1)
        if len(round_R) == 1:  # a band has no width there
            axes.vlines(round_R, low_R, high_R, color=colour, alpha=0.3, linewidth=9)
        axes.fill_between(round_R, low_R, high_R, color=colour, alpha=0.3, linewidth=0)


def draw_network(
    edges: list[tuple[int, int]],
    mixtures: list[list[float]] | None,
    n: int,
    truth: list[list[float]] | None = None,
) -> Figure:
    """Draw the graph of n clients as pies of their estimated mixtures, in rings of the true ones.

    Cluster s has the same colour in both: match the true distributions to the clusters first.
    Of many clients, histograms of degrees and shares are drawn: no one can read such a graph.
    """
    if n > DRAWN_AT_MOST:
        return _draw_histograms(edges, mixtures, n, truth)
    figure = Figure(figsize=(WIDTH_INCHES, WIDTH_INCHES), layout="constrained")
    axes = figure.add_subplot(aspect="equal", xlim=(-EDGE, EDGE), ylim=(-EDGE, EDGE))
    axes.set_axis_off()
    axes.set_title("Clients and their mixtures" if mixtures else "Clients", fontsize=TEXT_POINTS)
    position_N2 = _layout(edges, n)
    segments = [position_N2[[i, j]] for i, j in edges]
    width = float(np.clip(9 / max(len(edges), 1) ** 0.5, 0.15, 0.9))
    axes.add_collection(LineCollection(segments, colors=PALE, linewidths=width, zorder=1))
    if mixtures:
        _draw_pies(figure, axes, position_N2, mixtures, truth)
    else:
        size = float(np.clip(6000 / n, 6, 60))
        axes.scatter(position_N2[:, 0], position_N2[:, 1], s=size, color=tint(0), zorder=2)
    _number_clients(axes, position_N2, 1.6 * _radius(position_N2) if mixtures else 0.04)
    return figure


def _number_clients(axes: Axes, position_N2: Points, above: float) -> None:
    """Write the number of each client above it, if they are few."""
    for i, (x, y) in enumerate(position_N2 if len(position_N2) <= NUMBERED_AT_MOST else ()):
        text: dict[str, Any] = {"fontsize": 6, "ha": "center", "va": "bottom", "zorder": 4}
        axes.text(x, y + above, str(i), color=GREY, **text)


def _draw_histograms(
    edges: list[tuple[int, int]],
    mixtures: list[list[float]] | None,
    n: int,
    truth: list[list[float]] | None,
) -> Figure:
    """Draw how many clients have which degree, and which share of each cluster."""
    share_NS = np.asarray(mixtures or np.empty((n, 0)), dtype=float)
    clusters = share_NS.shape[1]
    figure, panels = make_panels(
        f"Degrees and mixtures of {n:,} clients", 1 + clusters, sharey=False
    )
    degree_N = np.bincount(np.asarray(edges, dtype=int).ravel(), minlength=n)
    _draw_degrees(panels[0], degree_N)
    for s, axes in enumerate(panels[1:]):
        share_N = share_NS[:, s]
        axes.hist(share_N[np.isfinite(share_N)], bins=SHARE_BINS, color=tint(s))
        if truth is not None:
            true_N = [shares[s] for shares in truth]
            axes.hist(true_N, bins=SHARE_BINS, histtype="step", color="black")
        axes.set(xlabel=f"Share of {_cluster(s)}")
    panels[0].set_ylabel("Clients")
    if clusters and truth is not None:
        line = Line2D([], [], color="black", label="true shares")
        add_legend(figure, [Patch(color=GREY, label="estimated shares"), line])
    return figure


def _draw_degrees(axes: Axes, degree_N: NDArray[np.int64]) -> None:
    low, high = int(degree_N.min()), int(degree_N.max())
    width = max(1, -(-(high - low + 1) // DEGREE_BINS))
    axes.hist(
        degree_N, bins=[edge - 0.5 for edge in range(low, high + width + 1, width)], color=GREY
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set(xlabel="Degree")


def _layout(edges: list[tuple[int, int]], n: int) -> Points:
    graph: nx.Graph[int] = nx.Graph(edges)
    graph.add_nodes_from(range(n))
    # Kamada-Kawai puts the components of a disconnected graph a million apart.
    has_kamada_kawai = n <= KAMADA_KAWAI_AT_MOST and nx.is_connected(graph)
    layout = nx.kamada_kawai_layout(graph) if has_kamada_kawai else nx.spring_layout(graph, seed=0)
    position_N2 = _fill(np.array([layout[i] for i in range(n)], dtype=float))
    return _fill(_separate(position_N2))


def _fill(position_N2: Points) -> Points:
    """Stretch the positions to the square from -1 to 1, except along an axis where all are near."""
    low_2, high_2 = position_N2.min(axis=0), position_N2.max(axis=0)
    span_2 = high_2 - low_2
    is_wide_2 = span_2 > LEAST_ASPECT * span_2.max()
    size_2 = np.where(is_wide_2, span_2, max(float(span_2.max()), 1e-9))
    filled_N2: Points = 2 * (position_N2 - (low_2 + high_2) / 2) / size_2
    return filled_N2


def _separate(position_N2: Points) -> Points:
    """Push clients apart that are so near that their pies would overlap."""
    least = 1.4 / len(position_N2) ** 0.5
    for _ in range(SEPARATION_STEPS):
        apart_NN2 = position_N2[:, None] - position_N2[None]
        distance_NN1 = np.maximum(np.linalg.norm(apart_NN2, axis=2, keepdims=True), 1e-9)
        push_NN1 = np.maximum(least - distance_NN1, 0) / 4
        position_N2 = position_N2 + (push_NN1 * apart_NN2 / distance_NN1).sum(axis=1)
    return position_N2


def _draw_pies(
    figure: Figure,
    axes: Axes,
    position_N2: Points,
    mixtures: list[list[float]],
    truth: list[list[float]] | None,
) -> None:
    radius = _radius(position_N2)
    ground = radius if truth is None else 1.55 * radius
    circles = [Circle((x, y), ground) for x, y in position_N2]
    white: dict[str, Any] = {"facecolors": "white", "edgecolors": "none"}
    axes.add_collection(PatchCollection(circles, zorder=2, **white))
    _draw_shares(axes, position_N2, mixtures, radius, radius)
    if truth is not None:
        _draw_shares(axes, position_N2, truth, 1.5 * radius, 0.3 * radius)
    clusters = max(len(mixture) for mixture in [*mixtures, *(truth or [])])
    note = None if truth is None else "disc: estimated, ring: true"
    add_legend(figure, [Patch(color=tint(s), label=_cluster(s)) for s in range(clusters)], note)


def _draw_shares(
    axes: Axes, position_N2: Points, mixtures: list[list[float]], radius: float, thickness: float
) -> None:
    """Draw the shares clockwise from the top, in grey if the mixture is unknown."""
    wedges, colours = [], []
    for (x, y), mixture in zip(position_N2, mixtures, strict=True):
        shares = np.asarray(mixture, dtype=float)
        shares = np.where(shares < LEAST_SHARE, 0.0, shares)  # else only its edge can be seen
        is_known = bool(np.isfinite(shares).all() and shares.sum() > 0)
        ends = 90 - 360 * np.cumsum([0.0, *(shares / shares.sum() if is_known else [1.0])])
        for s, (start, end) in enumerate(pairwise(ends)):
            if start > end:
                wedges.append(Wedge((x, y), radius, end, start, width=thickness))
                colours.append(tint(s) if is_known else GREY)
    style: dict[str, Any] = {"facecolors": colours, "edgecolors": "white", "linewidths": 0.3}
    axes.add_collection(PatchCollection(wedges, zorder=3, **style))


def _radius(position_N2: Points) -> float:
    """Return a radius at which few pies overlap and all can be read."""
    if len(position_N2) < 2:
        return 0.1
    distance_NN = np.linalg.norm(position_N2[:, None] - position_N2[None], axis=2)
    np.fill_diagonal(distance_NN, np.inf)
    return float(np.clip(0.33 * np.quantile(distance_NN.min(axis=1), 0.2), 0.02, 0.08))


# ---- parts of all figures


def make_panels(title: str, count: int = 1, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    """Return a column-wide figure with its panels, two or three in a row."""
    columns = min(count, 2 if count == 4 else 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH_INCHES, 1.0 + 2.0 * max(rows, 1.2)), layout="constrained")
    figure.suptitle(title, fontsize=TEXT_POINTS)
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


def _marker(rounds: Points) -> str | None:
    """Return a marker for a single point, which is invisible as a line."""
    return "o" if len(rounds) == 1 else None


def tint(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def _dash(i: int) -> str:
    return DASHES[(i + i // len(PALETTE)) % len(DASHES)]


def _cluster(s: int) -> str:
    return f"cluster {s}"
