"""The benchmark runs, reports and compares equal work; how fast this machine is today is not tested."""

import io
import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fedspd.bench import plain
from fedspd.bench.rounds import small_network, timed_rounds
from fedspd.bench.rows import QUICK, BenchRow, take_turns
from fedspd.bench.training import difference
from fedspd.cli.bench import table
from fedspd.config import validate
from fedspd.experiment.build import build_experiment

ROOT = Path(__file__).parents[2]
NAMES = ["training_1", "training_2", "second_worker", "round", "growth", "start"]


@pytest.fixture(scope="module")
def report() -> dict:
    program = "from fedspd.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "bench", "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_every_row_has_a_ratio_between_its_extremes_and_says_whether_the_target_is_met(report):
    assert [row["name"] for row in report["rows"]] == NAMES
    for row in report["rows"]:
        assert 0 < row["lowest"] <= row["ratio"] <= row["highest"] < 100
        assert row["met"] == (
            row["ratio"] >= row["target"] if row["at_least"] else row["ratio"] <= row["target"]
        )
        assert all(math.isfinite(number) and number > 0 for number in row["numbers"].values())
        assert len(row["what"]) > 20


def test_the_targets_are_those_of_the_documents(report):
    assert {row["name"]: row["target"] for row in report["rows"]} == {
        "training_1": 1.6, "training_2": 1.6, "second_worker": 0.95, "round": 1.1, "growth": 1.15, "start": 3.0,
    }  # fmt: skip
    page = (ROOT / "docs/performance.md").read_text()
    assert all(f"`{row['name']}`" in page for row in report["rows"])


def test_a_ratio_is_that_of_the_numbers_beside_it(report):
    """With one turn a median is the turn itself."""
    rows = {row["name"]: (row["ratio"], row["numbers"]) for row in report["rows"]}
    for name, over, under in (
        ("training_1", "fedspd", "plain"),
        ("second_worker", "fedspd", "plain"),
        ("round", "round", "passes"),
        ("growth", "clients_200", "clients_20"),
        ("start", "first_step", "import_torch"),
    ):
        ratio, numbers = rows[name]
        assert ratio == pytest.approx(numbers[over] / numbers[under], rel=0.01)


def test_a_round_and_a_start_hold_what_they_are_compared_with(report):
    ratios = {row["name"]: row["ratio"] for row in report["rows"]}
    assert ratios["round"] >= 1  # the passes are a part of the round
    assert ratios["start"] > 1  # a run imports torch, too


def test_the_report_names_the_machine_and_the_size(report):
    assert report["machine"]["torch"] == torch.__version__
    assert report["size"]["clients"] == 4
    assert report["size"]["turns"] == 1


def test_both_sides_train_the_same_parameters(report):
    """Other batches, another rate or another pooling would differ by about 0.01."""
    assert report["difference"] < 1e-12
    assert report["difference"] == difference(QUICK)


def test_the_table_says_what_is_met():
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(
            table([BenchRow.of("round", "a whole round", [1.2, 1.0, 1.4], 1.1, False, passes=2.0)])
        )
    (line,) = [line for line in captured.get().splitlines() if "a whole round" in line]
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        "a whole round",
        "1.20",
        "1.00 to 1.40",
        "at most 1.10",
        "no",
    ]


def test_a_row_is_the_median_with_its_extremes():
    row = BenchRow.of("a", "what", [3.0, 1.0, 2.0], 2.0, True, speed=12345.678)
    assert (row.ratio, row.lowest, row.highest, row.met) == (2.0, 1.0, 3.0, True)
    assert row.numbers == {"speed": 12350.0}
    assert not BenchRow.of("a", "what", [2.0], 1.9, False).met


def test_turns_are_taken_in_order_and_the_first_is_not_counted():
    order: list[str] = []

    def contestant(name: str) -> float:
        order.append(name)
        return float(len(order))

    assert take_turns([lambda: contestant("a"), lambda: contestant("b")], 2) == [
        (3.0, 4.0),
        (5.0, 6.0),
    ]
    assert order == ["a", "b"] * 3


def test_timed_rounds_leave_out_the_first_and_the_last():
    rounds = timed_rounds(*small_network(4, degree=3), turns=2)
    assert [timed.round for timed in rounds] == [2, 3]
    assert all(timed.seconds > timed.passes > 0 for timed in rounds)
    assert all(timed.processor > 0 for timed in rounds)


def test_the_small_network_is_as_small_as_is_said():
    """64 x 26 + 26 + 26 x 10 + 10 = 1,960 parameters."""
    config, data = small_network(8, degree=3)
    plan = build_experiment(validate(config), data).plan
    assert plan.learner.size == 1960
    assert [len(y) for y in plan.train.y] == [20] * 8


def test_the_plain_model_is_the_papers():
    """Convolutions 10 x 25 + 10 and 20 x 250 + 20, dense layers 980 x 50 + 50 and 50 x 10 + 10."""
    assert sum(p.numel() for p in plain.PlainCNN().parameters()) == 260 + 5020 + 49050 + 510
    assert [len(batch) for batch in plain.batches(120, torch.Generator())] == [50, 50, 20] * 5


def imported(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print('IMPORTED', *sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("IMPORTED")[2].split())


def test_a_run_does_not_wait_for_what_only_its_figures_need():
    modules = imported("import fedspd.cli.running")
    assert "torch" in modules
    assert not {"matplotlib", "networkx", "scipy.stats", "sklearn"} & modules


def test_help_for_the_benchmark_is_quick_too():
    modules = imported(
        "from fedspd.cli.main import guarded; assert guarded(['bench', '--help']) == 0"
    )
    assert "fedspd.cli.main" in modules
    assert not {"torch", "scipy", "numpy"} & modules


def test_the_environments_of_other_packages_have_our_torch():
    peers = ROOT / "benchmarks/packages"
    runner = runpy.run_path(str(peers / "run.py"))
    assert runner["pin"]("torch") == f"torch=={torch.__version__.partition('+')[0]}"
    assert all((peers / contestant.script).exists() for contestant in runner["CONTESTANTS"])
