"""The statistics of methods, and their differences to the reference."""

import json

import pytest

from fedspd.reporting.method_rows import compare_runs, score_along
from fedspd.reporting.runs import read_runs
from fedspd.reporting.statistics import Interval
from fedspd.storage.run_folder import RunFolder

HALF = 4.302653 / 3**0.5  # of the interval of three numbers whose standard deviation is 1


def test_row_has_the_means_over_seeds(three_seeds, compare):
    rows = compare(*three_seeds).rows
    assert [row.method for row in rows] == ["fedspd", "fedavg", "fedem"]
    fedavg = rows[1]
    assert fedavg.seeds == [0, 1, 2]
    assert fedavg.score == Interval(pytest.approx(0.7), pytest.approx(0.1 * HALF))
    assert fedavg.before.mean == pytest.approx(0.6)
    assert (fedavg.std, fedavg.worst) == (pytest.approx(0.1), pytest.approx(0.6))
    assert (fedavg.multicast, fedavg.point_to_point) == (1000, 2000)
    assert (fedavg.models, fedavg.seconds, fedavg.test_loss.mean) == (12, 1.5, 1.5)


def test_row_has_the_paired_difference_to_the_reference(three_seeds, compare):
    fedspd, fedavg, fedem = compare(*three_seeds).rows
    assert fedspd.difference is None
    assert fedavg.difference == Interval(pytest.approx(-0.1), pytest.approx(0, abs=1e-9))
    assert fedem.difference == Interval(pytest.approx(-0.75), pytest.approx(0.1 * HALF))


def test_any_method_can_be_the_reference(three_seeds):
    runs, _ = read_runs(three_seeds)
    fedspd, fedavg, _ = compare_runs(runs, "fedavg").rows
    assert fedspd.difference == Interval(pytest.approx(0.1), pytest.approx(0, abs=1e-9))
    assert fedavg.difference is None
    assert compare_runs(runs, "fedavg").example.method == "fedavg"


def test_a_reference_that_did_not_run_gives_no_differences(three_seeds):
    runs, _ = read_runs(three_seeds)
    assert [row.difference for row in compare_runs(runs, "local").rows] == [None, None, None]


def test_row_has_the_ratio_of_its_steps_to_local_updates(three_seeds, compare):
    """One local update by every client in every round takes 80 steps."""
    assert [row.steps_ratio for row in compare(*three_seeds).rows] == [1.25, 1, 2]


def test_curve_averages_seeds_and_adds_up_bytes(three_seeds, compare):
    curve = compare(*three_seeds).rows[1].curve
    assert curve.rounds == [1, 2]
    assert curve.score == [Interval(pytest.approx(0.6), pytest.approx(0.1 * HALF))] * 2
    assert curve.bytes == [1000, 2000]


def test_one_seed_has_no_interval(write_run, compare):
    (row,) = compare(write_run("a")).rows
    assert row.score == Interval(pytest.approx(0.6), None)


def test_difference_ignores_the_other_methods_own_options(write_run, compare):
    """FedAvg with and without fine-tuning: both have a difference to FedSPD."""
    tuned = [
        write_run(f"f{k}", "fedavg", scores=(0.4 + k,) * 2, config={"fedavg": {"finetune": k}})
        for k in (0, 0.1)
    ]
    rows = compare(write_run("fedspd", scores=(0.6, 0.6)), *tuned).rows
    assert [row.label for row in rows] == [
        "fedspd",
        "fedavg, finetune=0",
        "fedavg, finetune=0.1",
    ]
    differences = [row.difference and round(row.difference.mean, 9) for row in rows]
    assert differences == [None, -0.2, -0.1]


def test_difference_needs_the_same_graph(write_run, compare):
    sparse = {"kind": "ring", "degree": 2, "weights": "metropolis"}
    comparison = compare(
        write_run("usual"), write_run("sparse", "fedavg", config={"topology": sparse})
    )
    assert [row.difference for row in comparison.rows] == [None, None]
    assert comparison.axes == ["topology.degree", "topology.weights"]


def test_difference_is_taken_at_the_same_point(write_sweep, compare):
    rows = compare(write_sweep("clusters", [2, 4])).rows
    assert [row.difference.mean for row in rows if row.method == "local"] == [0, 0]


# ---- local-only training, and distributions


def test_hurt_is_the_share_of_clients_that_do_better_alone(write_run, compare):
    """Of four pairs of seed and client, one is worse than alone and one is equal."""
    folders = [
        write_run("a0", "fedavg", seed=0, scores=(0.5, 0.7)),
        write_run("a1", "fedavg", seed=1, scores=(0.9, 0.8)),
        write_run("l0", "local", seed=0, scores=(0.6, 0.7)),
        write_run("l1", "local", seed=1, scores=(0.8, 0.1)),
    ]
    assert {row.method: row.hurt for row in compare(*folders).rows} == {
        "fedavg": 0.25,
        "local": None,
    }


def test_hurt_is_paired_by_seed(write_run, compare):
    folders = [
        write_run("a0", "fedavg", seed=0, scores=(0.5, 0.7)),
        write_run("a1", "fedavg", seed=1, scores=(0.0, 0.0)),  # nothing to compare it with
        write_run("l0", "local", seed=0, scores=(0.6, 0.6)),
    ]
    assert compare(*folders).rows[0].hurt == 0.5


def test_hurt_compares_errors_in_a_regression(write_run, compare):
    folders = [
        write_run("a", "fedavg", errors=(1.0, 3.0)),
        write_run("l", "local", errors=(2.0, 9.0)),
    ]
    assert compare(*folders).rows[0].hurt == 0.0
    result = json.loads((folders[0] / "result.json").read_text())
    result["clients"]["rmse"] = [1.0, None]
    RunFolder(folders[0]).write("result.json", result)
    assert compare(*folders).rows[0].hurt == 0.5  # a loss that is not finite is worse than any


def test_hurt_is_unknown_without_local_only_training(three_seeds, compare):
    assert [row.hurt for row in compare(*three_seeds).rows] == [None, None, None]


def test_row_averages_the_accuracy_by_distribution_over_seeds(write_run, compare):
    def record(plain, rotated):
        scores = {"worst": min(plain, rotated), "smallest": rotated}
        names = {"names": ["plain", "rotated"], "accuracy": [plain, rotated]}
        return {"distributions": names | scores, "adjusted_rand_index": plain}

    (row,) = compare(
        write_run("a", seed=0, result=record(0.9, 0.5)),
        write_run("b", seed=1, result=record(0.3, 0.7)),
    ).rows
    assert row.distributions == {"plain": pytest.approx(0.6), "rotated": pytest.approx(0.6)}
    assert row.worst_distribution == pytest.approx(0.4)
    assert row.smallest_distribution == pytest.approx(0.6)
    assert row.adjusted_rand_index == pytest.approx(0.6)


def test_runs_recorded_before_distributions_have_none(three_seeds, compare):
    row = compare(*three_seeds).rows[0]
    assert (row.distributions, row.worst_distribution, row.adjusted_rand_index) == ({}, None, None)


# ---- accuracy along an axis


def test_score_along_a_swept_axis_is_a_line_per_method(write_sweep, compare):
    comparison = compare(write_sweep("data.alpha", [1, 5], options=True))
    (panel,) = score_along(comparison, "data.alpha").values()
    lines = {label: [(x, score.mean) for x, score in line] for label, line in panel.items()}
    assert lines == {"fedspd": [(1, 0.1), (5, 0.5)], "local": [(1, 0.1), (5, 0.5)]}


def test_score_along_an_axis_has_a_panel_per_point_of_the_others(write_run, compare):
    """A method's own options are lines, not panels."""
    folders = []
    for degree in (2, 4):
        for clusters in (1, 3):
            config = {"topology": {"kind": "er", "degree": degree}, "clusters": clusters}
            folders.append(write_run(f"s{degree}{clusters}", config=config))
            for k in (0, 5):
                tuned = config | {"fedavg": {"finetune": k}}
                folders.append(write_run(f"a{degree}{clusters}{k}", "fedavg", config=tuned))
    panels = score_along(compare(*folders), "topology.degree")
    assert list(panels) == ["clusters=1", "clusters=3"]
    for panel in panels.values():
        assert list(panel) == ["fedspd", "fedavg, finetune=0", "fedavg, finetune=5"]
        assert [value for value, _ in panel["fedspd"]] == [2, 4]


def test_a_reference_with_several_options_is_the_first_one(write_run, compare):
    """FedAvg as reference, plain and fine-tuned: the plain one has no difference to itself."""
    tuned = [
        write_run(f"f{k}", "fedavg", scores=(score,) * 2, config={"fedavg": {"finetune": k}})
        for k, score in ((0, 0.4), (10, 0.5))
    ]
    rows = compare(*tuned, write_run("local", "local", scores=(0.3, 0.3)), reference="fedavg").rows
    differences = {row.name: row.difference and row.difference.mean for row in rows}
    assert differences == {
        "fedavg, finetune=0": None,
        "fedavg, finetune=10": pytest.approx(0.1),
        "local": pytest.approx(-0.1),
    }


def test_own_options_are_part_of_the_name_and_no_shared_axis(write_run, compare):
    folders = []
    for degree in (2, 4):
        topology = {"topology": {"kind": "er", "degree": degree}}
        for k in (0, 10):
            config = topology | {"fedavg": {"finetune": k}}
            folders.append(write_run(f"f{degree}{k}", "fedavg", config=config))
    comparison = compare(*folders)
    assert comparison.axes == ["topology.degree", "fedavg.finetune"]
    assert comparison.shared_axes == ["topology.degree"]
    assert [row.name for row in comparison.rows] == [
        "fedavg, finetune=0",
        "fedavg, finetune=10",
    ] * 2
