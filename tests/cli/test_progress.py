"""Progress of runs and comparisons, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console

from fedspd.comparison.jobs import list_jobs
from fedspd.comparison.progress import ComparisonProgress
from fedspd.config import load
from fedspd.experiment.progress import RunProgress, describe_score


@pytest.fixture
def jobs():
    """Return two methods with two seeds of three rounds: 16 rounds with the final phases."""
    return list_jobs(load(overrides=["rounds=3"]), ["fedspd", "local"], 2)


def test_score_is_the_mean_accuracy_or_else_the_mean_loss():
    assert describe_score({"accuracy": [0.5, None, 0.6]}) == "accuracy 55.0 %"
    assert describe_score({"accuracy": [None], "test_loss": [1.0, 2.0]}) == "loss 1.5"
    regression = {"accuracy": [None], "test_loss": [1.0], "rmse": [1.0, 2.0], "r2": [0.25, None]}
    assert describe_score(regression) == "RMSE 1.5, R2 0.25"
    assert describe_score({"round": 1}) == ""


def test_run_progress_prints_about_ten_lines(capsys):
    progress = RunProgress()
    progress.on_start({"round": 0, "rounds": 99, "method": "fedspd"})
    for round in range(1, 100):
        progress.on_round({"round": round, "accuracy": [0.5]})
    progress.on_final({"round": 100, "accuracy": [0.75]})
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "fedspd, round 1 of 99: accuracy 50.0 %",
        "fedspd, round 10 of 99: accuracy 50.0 %",
    ]
    assert lines[-1] == "fedspd, at the end: accuracy 75.0 %"
    assert len(lines) == 11


def test_run_progress_prints_each_kind_of_alarm_once(capsys):
    progress = RunProgress()
    for round in (1, 2):
        progress.on_alarm(round, f"The loss is not finite at client {round}.")
    assert capsys.readouterr().err == "round 1: The loss is not finite at client 1.\n"


def test_comparison_progress_renders_a_row_per_method_and_a_bar(jobs):
    progress = ComparisonProgress(jobs, as_json=True)
    progress.on_start({"run": jobs[0].name, "round": 4, "rounds": 3})
    progress.on_start({"run": jobs[1].name, "round": 0, "rounds": 3})
    progress.on_round({"run": jobs[1].name, "round": 2, "accuracy": [0.5, 0.6]})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(progress.render())
    lines = console.export_text().splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
        ["fedspd", "1 of 2", "", ""],
        ["local", "0 of 2", "2 of 3", "accuracy 55.0 %"],
    ]
    assert "38%" in lines[-1]  # 4 + 2 of 16 rounds


def test_comparison_progress_weighs_runs_by_their_seconds(jobs):
    """One run of each method and seed; those of fedspd take three times as long."""
    seconds = {"fedspd": 30.0, "local": 10.0}
    progress = ComparisonProgress(jobs, True, lambda config: seconds[config.method])
    first = next(job for job in jobs if job.config.method == "fedspd")
    progress.on_start({"run": first.name, "round": 0, "rounds": 3})
    progress.on_round({"run": first.name, "round": 2, "accuracy": [0.5]})
    assert progress.total == 80
    assert progress.fraction == 15 / 80


def test_comparison_progress_prints_finished_runs_and_tenths(jobs, capsys):
    """Each round is 6 % of all 16 and takes 100 s; the second one completes a tenth."""
    progress = ComparisonProgress(jobs, as_json=False)
    seconds = [0.0]
    progress.bar.get_time = lambda: seconds[0]
    progress.on_start({"run": jobs[0].name, "round": 0, "rounds": 3})
    for round in (1, 2):
        seconds[0] += 100.0
        progress.on_round({"run": jobs[0].name, "round": round, "accuracy": [0.5]})
    progress.on_final({"run": jobs[0].name, "round": 4, "accuracy": [0.75]})
    assert capsys.readouterr().err.splitlines() == [
        "12 % done: 0 of 4 runs, 0:23:20 left",
        "fedspd,seed=0: accuracy 75.0 % (25 % of all rounds)",
    ]
