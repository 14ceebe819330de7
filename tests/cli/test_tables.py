"""The tables of runs and comparisons on a terminal."""

import io
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedspd.cli.tables import (
    comparison_table,
    describe_clusters,
    describe_distributions,
    describe_newcomers,
    fits_console,
    summary_table,
)
from fedspd.reporting.method_rows import Comparison, MethodRow, ScoreCurve
from fedspd.reporting.statistics import Interval

SUMMARY = {
    "accuracy": {"mean": 0.925, "std": 0.066, "worst": 0.821},
    "accuracy_before_final_phase": {"mean": 0.9},
    "clients": {"accuracy": [0.9, 0.95], "test_loss": [0.1, 0.3]},
    "models_sent": 3348,
    "bytes": {"multicast": 21_500_000, "point_to_point": 64_500_000},
    "seconds": 6.04,
}


def heads(table):
    return [column.header for column in table.columns]


def cells(table):
    return [list(column.cells) for column in table.columns]


@pytest.fixture
def comparison():
    unknown = Interval(None, None)
    row = MethodRow(
        method="fedspd",
        point={"topology.degree": 4},
        seeds=[0],
        score=Interval(0.925, None),
        difference=None,
        std=0.066,
        worst=0.821,
        before=unknown,
        test_loss=unknown,
        metrics={},
        target=None,
        classes={},
        distributions={},
        worst_distribution=None,
        smallest_distribution=None,
        hurt=None,
        clusters=(),
        purity=None,
        adjusted_rand_index=None,
        newcomers=unknown,
        newcomers_loss=unknown,
        multicast=21_500_000,
        point_to_point=64_500_000,
        models=3348,
        steps=100,
        steps_ratio=1.0,
        seconds=6.04,
        curve=ScoreCurve([], [], [], [], []),
        clients=[],
    )
    return Comparison([SimpleNamespace()], [row], "fedspd", ["topology.degree"], [])


def test_summary_table_shows_accuracy_and_cost():
    table = summary_table({"fedspd": SUMMARY}, fits=lambda table: True)
    assert table.title == "Test accuracy across clients (%) and communication cost"
    assert dict(zip(heads(table), cells(table), strict=True)) == {
        "method": ["fedspd"],
        "mean": ["92.5"],
        "spread": ["6.6"],
        "worst 10 %": ["82.1"],
        "before final": ["90.0"],
        "models": ["3,348"],
        "MB multicast": ["21.5"],
        "MB p2p": ["64.5"],
        "time (s)": ["6.0"],
    }


def test_summary_table_shows_rmse_and_r2_of_a_regression():
    scores = {
        "clients": {"accuracy": [None], "test_loss": [0.1], "rmse": [12.34], "r2": [0.5]},
        "metrics": {
            "rmse": {"mean": 12.34, "std": 1.5, "worst": 20.0},
            "r2": {"mean": 0.5, "std": 0.1, "worst": 0.2},
        },
        "metrics_before_final_phase": {"rmse": {"mean": 13.0}},
    }
    table = summary_table({"local": SUMMARY | scores}, fits=lambda table: True)
    assert table.title == "Test RMSE across clients and communication cost"
    row = dict(zip(heads(table), cells(table), strict=True))
    expected = {"mean": "12.3", "spread": "1.5", "worst 10 %": "20", "before final": "13"}
    assert {name: row[name] for name in expected} == {k: [v] for k, v in expected.items()}
    assert row["R2"] == ["0.5"]


def test_summary_table_shows_the_loss_of_a_regression_recorded_without_rmse():
    clients = {"accuracy": [None, None], "test_loss": [0.1, 0.3]}
    table = summary_table({"local": SUMMARY | {"clients": clients}}, fits=lambda table: True)
    assert table.title == "Test loss across clients and communication cost"
    assert heads(table)[:3] == ["method", "mean", "models"]
    assert cells(table)[1] == ["0.2"]


@pytest.mark.parametrize(("width", "last_head"), [(98, "time (s)"), (80, "time"), (60, "models")])
@pytest.mark.parametrize("method", ["fedspd", "own_method:Ditto"])
def test_summary_table_cuts_no_word_on_a_narrow_terminal(width, last_head, method):
    console = Console(width=width, file=io.StringIO())
    console.print(summary_table({method: SUMMARY}, partial(fits_console, console)))
    text = console.file.getvalue()
    assert "…" not in text
    assert method in text
    assert "82.1" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    if method == "fedspd":
        assert last_head in text


def test_newcomers_are_described_by_accuracy_or_else_by_rmse_or_loss():
    newcomers = {"accuracy": {"mean": 0.5}, "test_loss": [1.0, 2.0]}
    assert describe_newcomers(newcomers) == "newcomers have an accuracy of 50.0 % on average"
    newcomers["accuracy"]["mean"] = None
    assert describe_newcomers(newcomers) == "newcomers have a loss of 1.5 on average"
    newcomers["rmse"] = [3.0, 5.0]
    assert describe_newcomers(newcomers) == "newcomers have an RMSE of 4 on average"


def test_clusters_are_described_with_their_bodies():
    assert describe_clusters({"clusters": 1, "bodies": 1}) == "found 1 cluster"
    assert describe_clusters({"clusters": 2, "bodies": 1}) == (
        "found 2 clusters, which share one body"
    )
    assert describe_clusters({"clusters": 4, "bodies": 4}) == (
        "found 4 clusters, each with a body of its own"
    )


def test_distributions_are_described_with_the_agreement_of_clusters():
    record = {"names": ["plain", "rotated"], "accuracy": [0.5, None]}
    summary = {"distributions": record, "purity": None, "adjusted_rand_index": None}
    sentence = "accuracy by distribution: plain 50.0 %, rotated – %"
    assert describe_distributions(summary) == sentence
    found = {"purity": 0.9, "adjusted_rand_index": 0.644}
    assert describe_distributions(summary | found) == (
        f"{sentence}; purity 0.90, adjusted Rand index 0.64"
    )


def test_comparison_table_shows_axes_and_units(comparison):
    table = comparison_table(comparison, lambda table: True)
    assert table.title == "Test accuracy and cost"
    assert dict(zip(heads(table), cells(table), strict=True)) == {
        "degree": ["4"],
        "method": ["fedspd"],
        "seeds": ["1"],
        "accuracy (%)": ["92.5"],
        "worst 10 %": ["82.1"],
        "MB p2p": ["64.5"],
        "steps": ["100"],
        "time (s)": ["6.0"],
    }


@pytest.mark.parametrize(("most", "shown"), [(8, 8), (6, 6), (0, 4)])
def test_comparison_table_drops_columns_that_do_not_fit_but_not_the_accuracy(
    comparison, most, shown
):
    table = comparison_table(comparison, lambda table: len(table.columns) <= most)
    assert len(table.columns) == shown
    assert heads(table)[:4] == ["degree", "method", "seeds", "accuracy (%)"]
