"""Which figures are drawn, and with which numbers."""

import pytest

from fedspd.core.errors import StorageError
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


def test_mixtures_are_drawn_of_the_rounds_that_have_all_clusters(write_run, compare):
    """FedSPD-Split has one cluster in its warm-up and as many as it finds afterwards."""
    folder = write_run("a", "fedspd-split")
    found = [[[1.0], [1.0]], [[0.9, 0.1], [0.2, 0.8]], [[1.0, 0.0], [0.0, 1.0]]]
    for t, mixture in enumerate(found, start=3):
        cost = {"bytes": {"point_to_point": 0}, "seconds": {"total": 0.0}, "steps": 0}
        RunFolder(folder).append({"event": "round", "round": t, "mixture": mixture, **cost})
    panels = draw_comparison(compare(folder))["mixtures-by-round"].axes
    assert len(panels) == 2
    assert panels[0].lines[0].get_xdata().tolist() == [1, 2, 4, 5]
    assert panels[1].lines[1].get_ydata()[2:].tolist() == [0.8, 1.0]


def test_mixtures_of_one_cluster_are_not_drawn(write_run, compare):
    folder = write_run("a")
    cost = {"bytes": {"point_to_point": 0}, "seconds": {"total": 0.0}, "steps": 0}
    RunFolder(folder).append({"event": "round", "round": 3, "mixture": [[1.0]] * 2, **cost})
    assert "mixtures-by-round" not in draw_comparison(compare(folder))


def test_two_values_of_one_methods_option_are_rows_and_no_figure(write_run, compare):
    """FedAvg plain and fine-tuned among other methods; a third value makes a curve."""
    folders = [
        write_run(f"f{k}", "fedavg", config={"fedavg": {"finetune": k}}) for k in (0, 10, 20)
    ]
    other = write_run("local", "local")
    name = "accuracy-by-fedavg.finetune"
    assert name not in draw_comparison(compare(*folders[:2], other))
    assert name in draw_comparison(compare(*folders, other))
    assert name in draw_comparison(compare(*folders[:2]))


def test_figures_of_a_run_with_an_empty_graph_are_refused(write_run, compare):
    folder = write_run("a")
    (folder / "topology.json").write_text("{}")
    with pytest.raises(StorageError, match=r"topology.json' is damaged: it has no 'list'"):
        draw_comparison(compare(folder))
