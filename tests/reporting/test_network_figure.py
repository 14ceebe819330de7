"""The graph of the clients, drawn from plain numbers.

Shapes: N clients, 2 coordinates.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection, PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedspd.reporting.figure_style import GREY, PALETTE
from fedspd.reporting.network_figure import EDGE, _fill, _layout, draw_network

NAN = float("nan")
RING = [(i, (i + 1) % 4) for i in range(4)]


def draw(figure: Figure) -> None:
    """Draw the figure: matplotlib finds some errors only then."""
    figure.canvas.draw()


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def wedges(figure: Figure) -> list[PatchCollection]:
    """Return the white ground, then the discs, then the rings."""
    return [c for c in figure.axes[0].collections if isinstance(c, PatchCollection)]


def test_network_draws_edges_and_two_wedges_per_mixed_client() -> None:
    mixtures = [[0.25, 0.75], [0.5, 0.5], [1.0, 0.0], [NAN, NAN]]
    figure = draw_network(RING, mixtures, 4, None)
    draw(figure)
    (edges,) = (c for c in figure.axes[0].collections if isinstance(c, LineCollection))
    assert len(edges.get_segments()) == 4
    ground, discs = wedges(figure)
    assert len(ground.get_paths()) == 4
    colours = [to_hex(c).upper() for c in discs.get_facecolor()]
    first, second = PALETTE[:2]
    assert colours == [first, second, first, second, first, GREY]
    assert legend(figure) == ["cluster 0", "cluster 1"]


def test_network_draws_shares_clockwise_from_the_top() -> None:
    figure = draw_network([], [[0.25, 0.75]], 1, None)
    quarter = wedges(figure)[1].get_paths()[0].vertices
    assert quarter.min() >= -1e-9  # up and to the right of the client, which is at the origin


def test_network_adds_a_ring_for_the_truth() -> None:
    figure = draw_network(RING, [[0.5, 0.5]] * 4, 4, [[0.2, 0.3, 0.5]] * 4)
    draw(figure)
    _, discs, rings = wedges(figure)
    assert (len(discs.get_paths()), len(rings.get_paths())) == (8, 12)
    assert legend(figure) == ["cluster 0", "cluster 1", "a distribution without a cluster"]
    assert figure.legends[0].get_title().get_text() == "disc: estimated, ring: true"


def test_network_without_mixtures_draws_dots() -> None:
    figure = draw_network(RING, None, 4, None)
    draw(figure)
    (dots,) = (c for c in figure.axes[0].collections if isinstance(c, PathCollection))
    assert len(dots.get_offsets()) == 4
    assert figure.axes[0].get_title() == "Clients"


def heights(axes: Axes) -> list[float]:
    return [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]


def test_network_draws_histograms_of_many_clients() -> None:
    """A path: its two ends have degree 1, the other clients 2. One mixture is unknown."""
    shares = [[NAN, NAN], *([0.01, 0.99] for _ in range(100)), *([0.51, 0.49] for _ in range(200))]
    figure = draw_network([(i, i + 1) for i in range(300)], shares, 301, shares[1:] * 2)
    draw(figure)
    degrees, first, second = figure.axes
    assert heights(degrees) == [2, 299]
    assert (heights(first)[0], heights(first)[10], sum(heights(first))) == (100, 200, 300)
    assert (heights(second)[9], heights(second)[19]) == (200, 100)
    assert legend(figure) == ["estimated shares", "true shares"]


@settings(max_examples=15)
@given(st.integers(1, 12), st.data())
def test_layout_places_every_client_of_any_graph(n: int, data: st.DataObject) -> None:
    client = st.integers(0, n - 1)
    edges = data.draw(st.lists(st.tuples(client, client), max_size=20))
    place_N2 = _layout(edges, n)
    assert place_N2.shape == (n, 2)
    assert np.abs(place_N2).max() <= EDGE
    assert np.array_equal(place_N2, _layout(edges, n))


def test_layout_fills_the_square_and_keeps_clients_apart() -> None:
    """Two clients with the same neighbours would lie on each other."""
    edges = [(0, 1), (0, 2), (3, 1), (3, 2), (1, 2), (4, 0), (5, 3), (4, 5)]
    place_N2 = _layout(edges, 6)
    assert np.allclose([place_N2.min(0), place_N2.max(0)], [[-1, -1], [1, 1]])
    distance_NN = np.linalg.norm(place_N2[:, None] - place_N2[None], axis=2)
    assert distance_NN[~np.eye(6, dtype=bool)].min() > 0.3


def test_layout_of_a_line_stays_a_line() -> None:
    place_N2 = _fill(np.array([[0.0, 0.0], [1.0, 0.01], [2.0, 0.0]]))
    assert np.allclose(place_N2[:, 0], [-1, 0, 1])
    assert np.abs(place_N2[:, 1]).max() < 0.02


def test_network_shows_the_numbers_of_few_clients():
    figure = draw_network([(0, 1), (1, 2)], None, 3)
    assert {text.get_text() for text in figure.axes[0].texts} == {"0", "1", "2"}
    many = draw_network([(i, i + 1) for i in range(99)], None, 100)
    assert not many.axes[0].texts
