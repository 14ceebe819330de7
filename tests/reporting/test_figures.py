"""The figures, drawn from plain numbers.

Shapes: R rounds, N clients, S clusters.
"""

import threading
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.image import imread

from fedspd.core.errors import StorageError
from fedspd.core.scores import ACCURACY, RMSE
from fedspd.reporting import figure_files, figure_style, figures, panels

NAN = float("nan")


def draw(figure: Figure) -> None:
    """Draw the figure: matplotlib finds some errors only then."""
    figure.canvas.draw()


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def note(figure: Figure) -> str:
    return figure.legends[0].get_title().get_text()


def test_accuracy_by_round_draws_a_line_and_a_band_per_method_in_per_cent() -> None:
    curves = {"fedspd": ([1, 2], [0.5, 0.9], [0.1, 0.05]), "local": ([1, 2], [0.4, 0.6], None)}
    figure = figures.draw_accuracy_by_round(curves, None)
    draw(figure)
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Round", "Test accuracy (%)")
    assert [line.get_ydata().tolist() for line in axes.lines] == [[50, 90], [40, 60]]
    assert len(axes.collections) == 1  # only fedspd has a spread
    band = axes.collections[0].get_paths()[0].vertices
    assert sorted({round(float(y)) for y in band[:, 1]}) == [40, 60, 85, 95]
    assert legend(figure) == ["fedspd", "local"]
    assert note(figure) == "band: 95 % interval over seeds"


def test_bands_stay_between_0_and_100_per_cent_and_those_of_errors_above_0() -> None:
    curve = ([1, 2], [0.05, 0.98], [0.1, 0.1])
    for score, ends in ((ACCURACY, [0, 15, 88, 100]), (RMSE, [0, 0.15, 0.88, 1.08])):
        axes = figures.draw_accuracy_by_round({"fedspd": curve}, score=score).axes[0]
        band = axes.collections[0].get_paths()[0].vertices
        assert sorted({round(float(y), 6) for y in band[:, 1]}) == ends


def test_accuracy_by_round_explains_a_band_over_clients() -> None:
    figure = figures.draw_accuracy_by_round(
        {"fedspd": ([1, 2], [0.5, 0.9], [0.1, 0.05])}, spread=figures.OVER_CLIENTS
    )
    assert note(figure) == "band: standard deviation over clients"


def test_accuracy_figures_without_bands_do_not_explain_them() -> None:
    assert note(figures.draw_accuracy_by_round({"fedspd": ([1, 2], [0.5, 0.9], None)})) == ""
    by_bytes = {"Megabytes": {"fedspd": ([1, 2], [0.5, 0.9], None)}}
    assert note(figures.draw_accuracy_by_cost("bytes", by_bytes)) == ""
    panels = {"": {"fedspd": [(1, 0.5, 0.0), (2, 0.6, 0.0)]}}
    assert note(figures.draw_accuracy_by_value("clusters", panels)) == ""


def test_accuracy_by_round_marks_the_final_phase_after_the_last_round() -> None:
    curves = {"fedspd": ([1, 2], [0.5, 0.9], None), "local": ([1, 2], [0.4, 0.6], None)}
    figure = figures.draw_accuracy_by_round(curves, {"fedspd": (0.95, 0.02)})
    draw(figure)
    (point,) = figure.axes[0].containers
    x, y = point.lines[0].get_data()
    assert x[0] > 2
    assert y.tolist() == [95]
    assert max(figure.axes[0].get_xticks()) == 2
    assert legend(figure) == ["fedspd", "local", "after the final phase"]


def test_accuracy_by_round_leaves_out_nan() -> None:
    curves = {"fedspd": ([1, 2, 3], [0.5, NAN, 0.7], [0.1, 0.1, NAN]), "local": ([1], [NAN], [NAN])}
    figure = figures.draw_accuracy_by_round(curves, {"local": (NAN, NAN)})
    draw(figure)
    assert [line.get_xdata().tolist() for line in figure.axes[0].lines] == [[1, 3], []]
    assert not figure.axes[0].containers


def test_accuracy_by_round_shows_a_single_round_as_a_point() -> None:
    figure = figures.draw_accuracy_by_round({"fedspd": ([1], [0.5], [0.1])}, {"fedspd": (0.6, NAN)})
    draw(figure)
    assert figure.axes[0].lines[0].get_marker() == "o"
    assert figure.axes[0].get_xticks().tolist() == [1]


def test_accuracy_axis_ends_above_100_per_cent() -> None:
    figure = figures.draw_accuracy_by_round({"fedspd": ([1, 2], [0.99, 0.99], [0.2, 0.2])})
    assert 100 < figure.axes[0].get_ylim()[1] < 101


def test_means_take_two_thirds_of_the_height_under_the_wide_bands_of_two_seeds() -> None:
    curves = {
        "fedspd": ([1, 2], [0.4, 0.5], [0.4, 0.4]),
        "local": ([1, 2], [0.45, 0.6], [0.3, 0.01]),
    }
    for figure in (
        figures.draw_accuracy_by_round(curves),
        figures.draw_accuracy_by_cost("bytes", {"MB": curves, "s": curves}),
    ):
        for axes in figure.axes:
            assert axes.get_ylim() == pytest.approx((35, 65))
        assert note(figure) == "band: 95 % interval over seeds, cut at the edge"


def test_bands_that_fit_are_not_cut() -> None:
    curves = {"fedspd": ([1, 2], [0.4, 0.6], [0.1, 0.1]), "local": ([1, 2], [0.5, 0.5], None)}
    for score in (ACCURACY, RMSE):
        figure = figures.draw_accuracy_by_round(curves, {"fedspd": (0.8, 0.05)}, score=score)
        low, high = (end / (100 if score is ACCURACY else 1) for end in figure.axes[0].get_ylim())
        assert low < 0.3
        assert high > 0.85
        assert note(figure) == "band: 95 % interval over seeds"


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_accuracy_by_round_shows_whole_markers_at_the_ends_of_the_axis(accuracy) -> None:
    """Beside a spread curve, which stretches the axis."""
    curves = {"fedspd": ([1], [accuracy], None), "local": ([1, 9], [0.05, 0.95], [0.2, 0.2])}
    figure = figures.draw_accuracy_by_round(curves, {"fedspd": (accuracy, NAN)})
    draw(figure)
    axes = figure.axes[0]
    inside = axes.get_window_extent()
    _, y = axes.transData.transform((1, 100 * accuracy))
    radius = 0.5 * 4 * 2**0.5 * figure.dpi / 72  # of the diamond of the final phase
    assert inside.y0 <= y - radius
    assert y + radius <= inside.y1


def test_accuracy_by_round_without_methods_has_no_legend() -> None:
    figure = figures.draw_accuracy_by_round({}, None)
    draw(figure)
    assert not figure.legends


def test_accuracy_by_round_gives_ten_methods_ten_styles() -> None:
    figure = figures.draw_accuracy_by_round(
        {f"method {i}": ([1, 2], [0.1, 0.2], None) for i in range(10)}
    )
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 10


def test_client_boxes_show_every_client_with_a_number() -> None:
    figure = figures.draw_client_boxes(
        {"fedspd": [0.9, 0.95, NAN, 1.0], "local": [0.5], "lost": [NAN]}
    )
    draw(figure)
    axes = figure.axes[0]
    assert axes.get_ylabel() == "Test accuracy (%)"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["fedspd", "local", "lost"]
    points = [c.get_offsets() for c in axes.collections if isinstance(c, PathCollection)]
    assert [len(p) for p in points] == [3, 1, 0]
    assert points[0][:, 1].tolist() == pytest.approx([90, 95, 100])


def test_client_boxes_jitter_repeatably_and_near_the_box() -> None:
    def places() -> list[float]:
        return (
            figures.draw_client_boxes({"a": [0.5] * 50})
            .axes[0]
            .collections[0]
            .get_offsets()[:, 0]
            .tolist()
        )

    assert places() == places()
    assert len(set(places())) == 50
    assert max(abs(x) for x in places()) <= 0.15


def test_boxes_draw_a_sample_of_many_clients() -> None:
    figure = figures.draw_client_boxes({"fedspd": [i / 1000 for i in range(1001)]})
    (points,) = (c for c in figure.axes[0].collections if isinstance(c, PathCollection))
    percent = points.get_offsets()[:, 1]
    assert len(percent) == figure_style.DRAWN_AT_MOST
    assert (min(percent), max(percent)) == (0, 100)


def test_mixtures_of_many_clients_are_bands() -> None:
    """Shares 0, 1/400 ... 1: the middle half lies between 0.25 and 0.75."""
    share_N = [i / 400 for i in range(401)]
    figure = figures.draw_mixtures_by_round([1, 2], [[[u, 1 - u] for u in share_N]] * 2)
    draw(figure)
    outer, inner = figure.axes[0].collections
    for band, (low, high) in ((outer, (0.05, 0.95)), (inner, (0.25, 0.75))):
        value = band.get_paths()[0].vertices[:, 1]
        assert (value.min(), value.max()) == pytest.approx((low, high))
    assert len(figure.axes[0].lines) == 1
    assert legend(figure) == ["90 % of the clients", "50 % of the clients", "mean over clients"]


def test_mixtures_by_round_draw_a_panel_per_cluster_with_clients_and_mean() -> None:
    mixtures_RNS = [[[0.5, 0.3, 0.2], [0.1, 0.7, 0.2]], [[0.6, 0.2, 0.2], [0.2, 0.6, 0.2]]]
    figure = figures.draw_mixtures_by_round([1, 5], mixtures_RNS)
    draw(figure)
    assert [axes.get_title() for axes in figure.axes] == ["cluster 0", "cluster 1", "cluster 2"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"Round"}
    assert figure.get_supylabel() == "Share of the examples"
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [
        [0.5, 0.6],
        [0.1, 0.2],
        pytest.approx([0.3, 0.4]),
    ]


@pytest.mark.filterwarnings("error")
def test_mixtures_by_round_take_one_client_one_round_and_unknown_values() -> None:
    figure = figures.draw_mixtures_by_round([1], [[[1.0]]])
    draw(figure)
    assert [line.get_marker() for line in figure.axes[0].lines] == ["o", "o"]
    figure = figures.draw_mixtures_by_round([1, 2, 3], [[[0.5, 0.5]], [[NAN, NAN]], [[0.7, 0.3]]])
    draw(figure)
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1, 3]


@pytest.mark.parametrize(("clusters", "rows"), [(4, 2), (5, 2), (7, 3)])
def test_mixtures_by_round_put_many_clusters_into_rows(clusters: int, rows: int) -> None:
    figure = figures.draw_mixtures_by_round(
        [1, 2], np.full((2, 3, clusters), 1 / clusters).tolist()
    )
    assert len(figure.axes) == clusters
    assert figure.axes[0].get_gridspec().nrows == rows


def test_save_writes_both_files_and_nothing_else(tmp_path: Path) -> None:
    figure = figures.draw_client_boxes({"fedspd": [0.5, 0.6]})
    folder = tmp_path / "run" / "figures"
    assert figure_files.save(figure, folder, "boxes") == [
        folder / "boxes.png",
        folder / "boxes.pdf",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["boxes.pdf", "boxes.png"]
    assert imread(folder / "boxes.png").shape[1] == figure_style.WIDTH_INCHES * 150
    pdf = (folder / "boxes.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert b"/TrueType" in pdf or b"/CIDFontType2" in pdf
    assert b"/Type3" not in pdf


def test_save_replaces_a_file_by_equal_bytes_for_an_equal_figure(tmp_path: Path) -> None:
    def write(value: float) -> tuple[bytes, bytes]:
        png, pdf = figure_files.save(
            figures.draw_client_boxes({"fedspd": [0.5, value]}), tmp_path, "boxes"
        )
        return png.read_bytes(), pdf.read_bytes()

    first = write(0.6)
    assert write(0.7) != first
    assert write(0.6) == first


def test_save_in_threads_restores_matplotlibs_settings(tmp_path: Path) -> None:
    before = matplotlib.rcParams["pdf.fonttype"]
    drawn = [figures.draw_client_boxes({"fedspd": [0.5, 0.6]}) for _ in range(3)]
    threads = [
        threading.Thread(target=figure_files.save, args=(figure, tmp_path, f"boxes{i}"))
        for i, figure in enumerate(drawn)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.iterdir())) == 6
    assert matplotlib.rcParams["pdf.fonttype"] == before


def test_save_names_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"file/boxes\.png': the figure could not be written"):
        figure_files.save(figures.draw_client_boxes({"fedspd": [0.5]}), tmp_path / "file", "boxes")
    assert (tmp_path / "file").read_text() == "in the way"


def test_save_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    (tmp_path / "boxes.png").mkdir()  # a rename onto a folder fails, after the draft was written
    with pytest.raises(StorageError, match=r"boxes\.png': the figure could not be written"):
        figure_files.save(figures.draw_client_boxes({"fedspd": [0.5]}), tmp_path, "boxes")
    assert [path.name for path in tmp_path.iterdir()] == ["boxes.png"]


def test_accuracy_by_value_has_one_colour_per_method_and_intervals_side_by_side() -> None:
    panel = {"fedspd": [(3, 0.9, 0.1), (6, 0.95, 0.1)], "local": [(3, 0.8, 0.1), (6, 0.8, 0.1)]}
    figure = figures.draw_accuracy_by_value(
        "topology.degree", {"data.name=a": panel, "data.name=b": panel}
    )
    assert [axes.get_title() for axes in figure.axes] == ["data.name=a", "data.name=b"]
    drawn = [
        [
            line
            for line in axes.get_lines()
            if len(line.get_xdata()) == 2 and line.get_linestyle() != "None"
        ]
        for axes in figure.axes
    ]
    colours = [[line.get_color() for line in lines if line.get_marker() == "o"] for lines in drawn]
    assert colours[0] == colours[1]
    assert len(set(colours[0])) == 2
    places = [tuple(line.get_xdata()) for line in drawn[0] if line.get_marker() == "o"]
    assert len(set(places)) == 2
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["fedspd", "local"]
    assert note(figure) == "bar: 95 % interval over seeds"


def test_error_bars_stay_within_the_axes():
    figure = figures.draw_accuracy_by_value("clusters", {"": {"fedspd": [(1, 0.95, 0.4)]}})
    (bars,) = figure.axes[0].collections
    (low, high) = bars.get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((55, 100))


@pytest.mark.parametrize(("count", "ticks"), [(5, 5), (15, 3)])
def test_lines_have_few_ticks_and_do_not_magnify_chance(count, ticks):
    line = [(float(x), 0.93 + 0.0001 * x, 0.0) for x in range(count)]
    shown = {"": {"FedSPD": line}}
    (axes,) = panels.draw_lines("Title", "epochs", shown, "Test accuracy (%)", "-", {}).axes
    assert ticks <= len(axes.get_xticks()) <= 8
    low, high = axes.get_ylim()
    assert high - low >= 4
    assert low < 93 < high
