"""Which figures are drawn, and with which numbers."""

from fedspd.reporting.run_figures import draw_comparison, true_mixtures
from fedspd.storage.run_folder import RunFolder


def test_curves_at_a_single_point_are_labelled_without_it(write_sweep, compare):
    sweep = write_sweep("clusters", [2, 4, 6])
    for result in list(sweep.glob("clusters=[46],*/result.json")):
        result.unlink()
    figure = draw_comparison(compare(sweep))["accuracy-by-round"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["fedspd", "local", "after the final phase"]


def test_true_mixtures_are_in_the_order_of_the_clusters_that_stand_for_them(write_run):
    """Cluster 0 stands for distribution 1, cluster 2 for distribution 0, and cluster 1 for none."""
    folder = RunFolder(write_run("a"))
    folder.append({"event": "final", "round": 3, "table": [[0, 5], [1, 0], [8, 0]]})
    assert true_mixtures(folder) == [[0.25, 0, 0.75], [0.75, 0, 0.25]]
