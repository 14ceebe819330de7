"""The columns of a comparison table."""

from fedspd.reporting import columns
from fedspd.reporting.statistics import Interval


def find_column(comparison, title):
    (column,) = [c for c in columns.comparison_columns(comparison) if c.title == title]
    return column


def best_rows(comparison, title):
    column = find_column(comparison, title)
    return [row.label for row in comparison.rows if columns.is_best(comparison, row, column)]


def test_interval_shows_its_half_width_if_it_is_known():
    assert columns.format_interval(Interval(0.6, None)) == "60.0"
    assert columns.format_interval(Interval(0.6, 0.012)) == "60.0 ± 1.2"


def test_difference_has_a_sign():
    assert columns.format_difference(Interval(-0.012, 0.004)) == "−1.2 ± 0.4"
    assert columns.format_difference(Interval(0.05, None)) == "+5.0"
    assert columns.format_difference(None) == "–"


def test_steps_show_their_ratio_if_they_exceed_local_updates(three_seeds, compare):
    comparison = compare(*three_seeds)
    column = find_column(comparison, "steps")
    assert [column.text(row) for row in comparison.rows] == ["100 (×1.2)", "80", "160 (×2)"]


def test_columns_name_the_reference_and_leave_out_what_no_row_has(three_seeds, compare):
    titles = [column.title for column in columns.comparison_columns(compare(*three_seeds))]
    assert titles[:3] == ["seeds", "accuracy (%)", "vs fedspd (pp)"]
    assert "newcomers (%)" not in titles


def test_best_is_chosen_among_all_methods_at_a_shared_point(write_run, compare):
    """All nine rows share one point; the options of FedAvg do not count."""
    scores = {"fedspd": 0.6, "local": 0.55, "ifca": 0.5, "pfedme": 0.3, "fedem": 0.5}
    folders = [write_run(method, method, scores=(s, s)) for method, s in scores.items()]
    for k in range(4):
        config = {"fedavg": {"finetune": k}}
        folders.append(write_run(f"f{k}", "fedavg", scores=(0.5 + k / 10,) * 2, config=config))
    assert best_rows(compare(*folders), "accuracy (%)") == ["fedavg, finetune=3"]


def test_scores_that_differ_in_their_last_digit_are_all_best(write_run, compare):
    """Sums in another order differ in the last digit."""
    scores = {"fedspd": 0.5, "fedavg": 0.872222222, "fedem": 0.8722222223333}
    folders = [write_run(method, method, scores=(s, s)) for method, s in scores.items()]
    assert best_rows(compare(*folders), "accuracy (%)") == ["fedavg", "fedem"]


def test_columns_show_distributions_and_hurt_clients(write_run, compare):
    record = {"names": ["plain", "rotated"], "accuracy": [0.9, None], "worst": 0.9, "smallest": 0.9}
    comparison = compare(
        write_run("a", scores=(0.5, 0.7), result={"distributions": record}),
        write_run("l", "local", scores=(0.6, 0.6)),
    )
    texts = {
        column.title: [column.text(row) for row in comparison.rows]
        for column in columns.comparison_columns(comparison)
    }
    assert texts["by distribution (%)"] == ["plain 90.0, rotated –", "–"]
    assert texts["worst distribution"] == ["90.0", "–"]
    assert texts["smallest distribution"] == ["90.0", "–"]
    assert texts["hurt (%)"] == ["50.0", "–"]
    assert "ARI" not in texts


def test_few_bytes_are_not_shown_as_none():
    assert [columns.format_megabytes(count) for count in (0, 12_345, 99_000, 250_000)] == [
        "0.0",
        "0.012",
        "0.099",
        "0.2",
    ]


def test_columns_show_the_numbers_of_clusters_that_runs_found(write_run, compare):
    folders = [
        write_run(f"s{seed}", "fedspd-split", seed=seed, result={"clusters": found})
        for seed, found in enumerate((2, 1, 2))
    ]
    comparison = compare(*folders, write_run("l", "local", result={"clusters": None}))
    column = find_column(comparison, "clusters found")
    assert [column.text(row) for row in comparison.rows] == ["1, 2", "–"]
