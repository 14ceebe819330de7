"""Draw the graph of the clients and their mixtures from plain numbers.

Shapes: N clients, S clusters, 2 coordinates.
"""

from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Patch, Wedge
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedspd.reporting.figure_style import (
    DARK,
    DRAWN_AT_MOST,
    GREY,
    PALE,
    TEXT_POINTS,
    WIDTH_INCHES,
    Points,
    ShownFigure,
    add_legend,
    cluster_name,
    make_panels,
    tint,
)

EDGE = 1.15  # layouts fill the square from -1 to 1
SEPARATION_STEPS = 50
LEAST_ASPECT = 0.3  # of a layout that is stretched to a square
LEAST_SHARE = 0.005  # of a mixture that is drawn
NUMBERED_AT_MOST = 60  # clients; the numbers of more hide each other
SHARE_BINS = [i / 20 for i in range(21)]
DEGREE_BINS = 30  # at most
KAMADA_KAWAI_AT_MOST = 100  # clients; its time is cubic in their number


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
    figure = ShownFigure(figsize=(WIDTH_INCHES, WIDTH_INCHES), layout="constrained")
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
        number = axes.text(x, y + above, str(i), color=DARK, **text)
        number.set_path_effects([withStroke(linewidth=2, foreground="white")])  # over edges


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
        axes.set(xlabel=f"Share of {cluster_name(s)}")
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
    names = [cluster_name(s) for s in range(max(map(len, mixtures)))]
    if truth is not None:
        names += ["a distribution without a cluster"] * (len(truth[0]) - len(names))
    note = None if truth is None else "disc: estimated, ring: true"
    add_legend(figure, [Patch(color=tint(s), label=name) for s, name in enumerate(names)], note)


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
