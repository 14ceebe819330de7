"""The figures of runs, from plain numbers: accuracies and shares are fractions, and what is not finite is left out.

No pyplot, hence no global state: every function returns a matplotlib Figure of its own.

Shapes: R rounds, N clients, S clusters, 2 coordinates.
"""

import io
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
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

from fedspd.core.errors import StorageError

Curve = tuple[Sequence[float], list[float], list[float] | None]
Line = list[tuple[Any, float, float]]
Points = NDArray[np.float64]

# Okabe and Ito's colours, told apart by colour-blind readers; yellow, the palest, comes last
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
DASHES = ("-", "--", "-.", ":")
GREY, PALE = "#999999", "#BBBBBB"
WIDTH = 5.0  # inches: a column of a paper
TEXT, SMALL = 9, 8  # points
LEGEND = 84  # letters in a line of the legend, the sample of each entry being 6
OVER_SEEDS, OVER_CLIENTS = (
    "95 % interval over seeds",
    "standard deviation over clients",
)  # what a band or bar shows
EDGE = 1.15  # layouts fill the square from -1 to 1

PIES_AT_MOST = 300  # more clients than this are drawn as dots
CAREFUL_LAYOUT_AT_MOST = 100  # Kamada-Kawai takes time cubic in the clients

_settings = threading.Lock()


def accuracy_by_round(
    curves: dict[str, Curve],
    final: dict[str, tuple[float, float]] | None = None,
    spread: str = OVER_SEEDS,
) -> Figure:
    """curves: method -> rounds, mean, spread; final: method -> mean and spread after the final phase; spread: what it is."""
    figure, (axes,) = _panels("Accuracy by round")
    rounds = [round for curve in curves.values() for round in curve[0]]
    for i, (method, curve) in enumerate(curves.items()):
        _draw_curve(axes, method, curve, i)
    if final and rounds:
        gap = 0.02 * max(max(rounds) - min(rounds), 1)
        for i, method in enumerate(curves):
            _draw_final(
                axes, max(rounds) + (i + 2) * gap, *final.get(method, (np.nan, np.nan)), _colour(i)
            )
    _label_accuracy(axes, "Round")
    _tick_rounds(axes, rounds)
    handles = list(axes.get_legend_handles_labels()[0])
    if final:
        handles.append(
            Line2D(
                [],
                [],
                color=GREY,
                marker="D",
                markersize=4,
                linestyle="",
                label="after the final phase",
            )
        )
    _legend(figure, handles, _bands(curves, spread))
    return figure


def accuracy_by_bytes(curves: dict[str, Curve]) -> Figure:
    """curves: method -> bytes sent until then, mean, spread; of a method that sends nothing only the end is drawn."""
    figure, (axes,) = _panels("Accuracy by bytes sent, point to point")
    for i, (method, (sent, mean, spread)) in enumerate(curves.items()):
        if sent[0] == sent[-1]:
            sent, mean, spread = sent[-1:], mean[-1:], spread and spread[-1:]
        _draw_curve(axes, method, ([count / 1e6 for count in sent], mean, spread), i)
    _label_accuracy(axes, "Megabytes sent by all clients")
    _legend(figure, list(axes.get_legend_handles_labels()[0]), _bands(curves, OVER_SEEDS))
    return figure


def _bands(curves: dict[str, Curve], spread: str) -> str | None:
    return f"band: {spread}" if any(curve[2] is not None for curve in curves.values()) else None


def accuracy_by_value(axis: str, panels: dict[str, dict[str, Line]]) -> Figure:
    """panels: place on the other axes -> label -> value of this axis, mean, and how far its interval reaches."""
    figure, drawn = _panels(f"Accuracy by {axis}", len(panels))
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    values = list(
        dict.fromkeys(
            value for lines in panels.values() for line in lines.values() for value, _, _ in line
        )
    )
    numeric = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )
    place = {value: float(value) if numeric else float(i) for i, value in enumerate(values)}
    gap = 0.015 * max(
        max(place.values()) - min(place.values()), 1
    )  # else the last line's interval hides the others
    for axes, (spot, lines) in zip(drawn, panels.items(), strict=True):
        for label, line in lines.items():
            i = labels.index(label)
            shift = (i - (len(labels) - 1) / 2) * gap
            _draw_line(
                axes, label, [(place[value] + shift, mean, half) for value, mean, half in line], i
            )
        axes.set_xticks([place[value] for value in values], [str(value) for value in values])
        axes.set_xlim(
            min(place.values()) - len(labels) * gap, max(place.values()) + len(labels) * gap
        )
        axes.set_title(spot.replace(", ", "\n"), fontsize=SMALL)
        _label_accuracy(axes, axis)
        axes.label_outer()
    handles = {
        label: handle
        for axes in drawn
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    barred = any(
        half for lines in panels.values() for line in lines.values() for _, _, half in line
    )
    _legend(figure, [handles[label] for label in labels], f"bar: {OVER_SEEDS}" if barred else None)
    return figure


def _draw_line(axes: Axes, label: str, line: list[tuple[float, float, float]], i: int) -> None:
    x, mean, half = np.array(line).T
    style: dict[str, Any] = {
        "color": _colour(i),
        "linestyle": _dash(i),
        "marker": "o",
        "markersize": 4,
        "linewidth": 1.5,
        "capsize": 3,
    }
    axes.errorbar(x, 100 * mean, yerr=100 * np.nan_to_num(half), label=label, **style)


def _label_accuracy(axes: Axes, xlabel: str) -> None:
    low, high = axes.get_ylim()
    axes.set(xlabel=xlabel, ylabel="Test accuracy (%)", ylim=(max(low, -1), min(high, 101)))


def _draw_curve(axes: Axes, method: str, curve: Curve, i: int) -> None:
    rounds, mean, spread = (
        np.asarray(part, dtype=float)
        for part in (curve[0], curve[1], curve[2] or [0.0] * len(curve[0]))
    )
    kept = np.isfinite(mean)
    rounds, mean, spread = rounds[kept], 100 * mean[kept], 100 * np.nan_to_num(spread[kept])
    axes.plot(
        rounds,
        mean,
        color=_colour(i),
        linestyle=_dash(i),
        marker=_marker(rounds),
        markersize=4,
        label=method,
    )
    if curve[2] is not None:
        axes.fill_between(
            rounds, mean - spread, mean + spread, color=_colour(i), alpha=0.15, linewidth=0
        )


def _draw_final(axes: Axes, x: float, mean: float, spread: float, colour: str) -> None:
    if np.isfinite(mean):
        error = 100 * np.nan_to_num(spread)
        axes.errorbar(
            [x],
            [100 * mean],
            yerr=[error],
            color=colour,
            marker="D",
            markersize=4,
            linewidth=1,
            capsize=2,
        )


def client_boxes(accuracy: dict[str, list[float]]) -> Figure:
    """A box over the clients of each method, and every client as a point."""
    figure, (axes,) = _panels("Accuracy of the clients")
    black = {"color": "black", "linewidth": 1.5}
    for i, values in enumerate(accuracy.values()):
        percent_N = 100 * np.asarray(values, dtype=float)
        percent_N = percent_N[np.isfinite(percent_N)]
        axes.scatter(
            i + _jitter(len(percent_N)), percent_N, s=9, color=_colour(i), alpha=0.6, linewidths=0
        )
        axes.boxplot(
            [percent_N], positions=[i], widths=0.45, showfliers=False, medianprops=black, zorder=3
        )
    crowded = sum(len(method) for method in accuracy) > 48
    axes.set_xticks(
        range(len(accuracy)),
        list(accuracy),
        rotation=25 if crowded else 0,
        ha="right" if crowded else "center",
    )
    axes.set(ylabel="Test accuracy (%)", xlim=(-0.6, max(len(accuracy), 1) - 0.4))
    return figure


def _jitter(n: int) -> Points:
    """n offsets that spread evenly however many there are: multiples of the golden ratio, modulo 1."""
    return 0.3 * ((np.arange(n) * (5**0.5 - 1) / 2) % 1 - 0.5)


def mixtures_by_round(
    rounds: Sequence[int], mixtures_RNS: Sequence[Sequence[Sequence[float]]]
) -> Figure:
    """A panel per cluster: its share at every client (thin) and their mean (thick)."""
    share_RNS = np.asarray(mixtures_RNS, dtype=float)
    known_R = np.isfinite(share_RNS).any(axis=1).all(axis=1)
    round_R, share_RNS = np.asarray(rounds)[known_R], share_RNS[known_R]
    figure, panels = _panels("Mixtures by round", share_RNS.shape[2])
    marker = _marker(round_R)
    for s, axes in enumerate(panels):
        share_RN = share_RNS[:, :, s]
        axes.plot(
            round_R,
            share_RN,
            color=_colour(s),
            linewidth=0.6,
            alpha=0.5,
            marker=marker,
            markersize=3,
        )
        axes.plot(
            round_R,
            np.nanmean(share_RN, axis=1),
            color="black",
            linewidth=1.5,
            marker=marker,
            markersize=4,
        )
        axes.set(xlabel="Round", ylim=(-0.02, 1.02))
        axes.set_title(_cluster(s), fontsize=TEXT)
        _tick_rounds(axes, round_R.tolist())
    figure.supylabel("Share of the examples", fontsize=TEXT)
    _legend(
        figure,
        [
            Line2D([], [], color=GREY, linewidth=0.6, label="a client"),
            Line2D([], [], color="black", label="mean over clients"),
        ],
    )
    return figure


def network(
    edges: list[tuple[int, int]],
    mixtures: list[list[float]] | None,
    n: int,
    truth: list[list[float]] | None = None,
) -> Figure:
    """The graph of n clients, each a pie of its estimated mixture, with a ring of the true one where it is given.

    Cluster s of the truth has the colour of cluster s of the estimate: match them before.
    """
    figure = Figure(figsize=(WIDTH, WIDTH), layout="constrained")
    axes = figure.add_subplot(aspect="equal", xlim=(-EDGE, EDGE), ylim=(-EDGE, EDGE))
    axes.set_axis_off()
    axes.set_title("Clients and their mixtures" if mixtures else "Clients", fontsize=TEXT)
    place_N2 = _layout(edges, n)
    thickness = float(np.clip(9 / max(len(edges), 1) ** 0.5, 0.15, 0.9))
    axes.add_collection(
        LineCollection(
            [place_N2[[i, j]] for i, j in edges], colors=PALE, linewidths=thickness, zorder=1
        )
    )
    if n > PIES_AT_MOST or not mixtures:
        _draw_dots(figure, axes, place_N2, mixtures)
    else:
        _draw_pies(figure, axes, place_N2, mixtures, truth)
    return figure


def _layout(edges: list[tuple[int, int]], n: int) -> Points:
    graph: nx.Graph[int] = nx.Graph(edges)
    graph.add_nodes_from(range(n))
    # Kamada-Kawai would put the pieces of a graph that is not connected a million apart
    careful = n <= CAREFUL_LAYOUT_AT_MOST and nx.is_connected(graph)
    place = nx.kamada_kawai_layout(graph) if careful else nx.spring_layout(graph, seed=0)
    return np.array([place[i] for i in range(n)], dtype=float)


def _draw_dots(
    figure: Figure, axes: Axes, place_N2: Points, mixtures: list[list[float]] | None
) -> None:
    size = float(np.clip(6000 / len(place_N2), 6, 60))
    if not mixtures:
        axes.scatter(place_N2[:, 0], place_N2[:, 1], s=size, color=_colour(0), zorder=2)
        return
    share_N = np.array([mixture[0] for mixture in mixtures], dtype=float)
    known = np.isfinite(share_N)
    axes.scatter(place_N2[~known, 0], place_N2[~known, 1], s=size, color=GREY, zorder=2)
    dots = axes.scatter(
        place_N2[known, 0],
        place_N2[known, 1],
        s=size,
        c=share_N[known],
        cmap="cividis",
        vmin=0,
        vmax=1,
        linewidths=0,
        zorder=2,
    )
    bar = figure.colorbar(dots, ax=axes, shrink=0.5)
    bar.set_label(f"Share of {_cluster(0)}", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)


def _draw_pies(
    figure: Figure,
    axes: Axes,
    place_N2: Points,
    mixtures: list[list[float]],
    truth: list[list[float]] | None,
) -> None:
    radius = _radius(place_N2)
    ground = radius if truth is None else 1.55 * radius
    axes.add_collection(
        PatchCollection(
            [Circle((x, y), ground) for x, y in place_N2],
            facecolors="white",
            edgecolors="none",
            zorder=2,
        )
    )
    _draw_shares(axes, place_N2, mixtures, radius, radius)
    if truth is not None:
        _draw_shares(axes, place_N2, truth, 1.5 * radius, 0.3 * radius)
    clusters = max(len(mixture) for mixture in [*mixtures, *(truth or [])])
    note = None if truth is None else "disc: estimated, ring: true"
    _legend(figure, [Patch(color=_colour(s), label=_cluster(s)) for s in range(clusters)], note)


def _draw_shares(
    axes: Axes, place_N2: Points, mixtures: list[list[float]], radius: float, thickness: float
) -> None:
    """Clockwise from the top; grey where the mixture is not known."""
    wedges, colours = [], []
    for (x, y), mixture in zip(place_N2, mixtures, strict=True):
        shares = np.asarray(mixture, dtype=float)
        known = bool(np.isfinite(shares).all() and shares.sum() > 0)
        ends = 90 - 360 * np.cumsum([0.0, *(shares / shares.sum() if known else [1.0])])
        for s, (start, end) in enumerate(pairwise(ends)):
            if start > end:
                wedges.append(Wedge((x, y), radius, end, start, width=thickness))
                colours.append(_colour(s) if known else GREY)
    axes.add_collection(
        PatchCollection(wedges, facecolors=colours, edgecolors="white", linewidths=0.3, zorder=3)
    )


def _radius(place_N2: Points) -> float:
    """Small enough that few neighbouring pies overlap, large enough to read."""
    if len(place_N2) < 2:
        return 0.1
    distance_NN = np.linalg.norm(place_N2[:, None] - place_N2[None], axis=2)
    np.fill_diagonal(distance_NN, np.inf)
    return float(np.clip(0.33 * np.quantile(distance_NN.min(axis=1), 0.2), 0.02, 0.08))


def _panels(title: str, count: int = 1) -> tuple[Figure, list[Axes]]:
    """A column-wide figure of panels, two or three in a row, without needless lines."""
    columns = min(count, 2 if count == 4 else 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, 1.0 + 2.0 * max(rows, 1.2)), layout="constrained")
    figure.suptitle(title, fontsize=TEXT)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel().tolist()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=SMALL)
        axes.xaxis.label.set_size(TEXT)
        axes.yaxis.label.set_size(TEXT)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def _tick_rounds(axes: Axes, rounds: Sequence[float]) -> None:
    """Whole rounds only, and none beyond the last."""
    if rounds:
        ticks = MaxNLocator(nbins=6, integer=True).tick_values(min(rounds), max(rounds))
        axes.set_xticks([tick for tick in ticks if min(rounds) <= tick <= max(rounds)])
    if len(set(rounds)) == 1:
        axes.set_xlim(rounds[0] - 0.5, rounds[0] + 0.5)


def _legend(figure: Figure, handles: list[Artist], title: str | None = None) -> None:
    """Below the panels, where it can hide nothing."""
    if handles:
        longest = max(len(str(handle.get_label())) for handle in handles)
        rows = -(-len(handles) // max(1, min(4, LEGEND // (longest + 6))))
        columns = -(-len(handles) // rows)
        style = {"fontsize": SMALL, "title_fontsize": SMALL, "frameon": False}
        figure.legend(
            handles=handles, title=title, ncols=columns, loc="outside lower center", **style
        )


def _marker(rounds: Points) -> str | None:
    """A line of a single point would not be seen."""
    return "o" if len(rounds) == 1 else None


def _colour(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def _dash(i: int) -> str:
    return DASHES[(i + i // len(PALETTE)) % len(DASHES)]


def _cluster(s: int) -> str:
    return f"cluster {s}"


def svg(figure: Figure) -> bytes:
    """The figure on a transparent ground, as text; the same figure is the same text."""
    part = io.BytesIO()
    with _settings, matplotlib.rc_context({"svg.hashsalt": "fedspd"}):
        figure.savefig(part, format="svg", transparent=True, metadata={"Date": None})
    return part.getvalue()


def save(figure: Figure, folder: Path | str, name: str) -> list[Path]:
    """name.png and name.pdf; whoever looks meanwhile sees the old file or the new one, never a part."""
    return [_save(figure, Path(folder) / f"{name}.{kind}", kind) for kind in ("png", "pdf")]


def _save(figure: Figure, path: Path, kind: str) -> Path:
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # fonts as TrueType, since many publishers refuse Type 3; no date, so that the same figure is the same file
        with _settings, matplotlib.rc_context({"pdf.fonttype": 42}):
            figure.savefig(
                part,
                format=kind,
                dpi=150,
                metadata={"CreationDate": None} if kind == "pdf" else None,
            )
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise StorageError(
            f"The figure {path} could not be written: {error.strerror}; make room or choose a folder that can be written."
        ) from error
    return path
