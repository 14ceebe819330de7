"""fedspd bench: it runs, reports and compares equal work; the machine's speed is not tested."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from chaos.commands import Command
from fedspd.bench.results import BenchmarkResult
from fedspd.cli.bench import result_table
from fedspd.core.precision import has_bfloat16

ROOT = Path(__file__).parents[2]
TARGETS = {
    "bf16_mnist": 1.98,
    "cifar_small": 1.09,
    "bf16_cifar": 1.96,
    "mobilenet": 1.66,
    "bf16_mobilenet": 1.62,
    "training_1": 1.6,
    "training_2": 1.6,
    "second_worker": 0.95,
    "small_20": 3.0,
    "small_200": 8.0,
    "round": 1.1,
    "split": 1.15,
    "private": 3.0,
    "growth": 1.15,
    "memory": 3.0,
    "start": 3.0,
}


def measured_targets() -> dict[str, float]:
    """Leave out bfloat16 where the processor has none."""
    names = [name for name in TARGETS if has_bfloat16() or not name.startswith("bf16")]
    return {name: TARGETS[name] for name in names}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    done = Command(["bench", "--quick", "--json"], tmp_path_factory.mktemp("bench") / "log")
    assert done.end() == 0, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_bench_reports_each_ratio_between_its_extremes(report):
    assert [row["name"] for row in report["rows"]] == list(measured_targets())
    for row in report["rows"]:
        assert 0 < row["lowest"] <= row["ratio"] <= row["highest"] < 100
        assert all(math.isfinite(number) and number > 0 for number in row["numbers"].values())
        assert len(row["what"]) > 20


def test_bench_reports_whether_each_target_is_met(report):
    assert {row["name"]: row["target"] for row in report["rows"]} == measured_targets()
    for row in report["rows"]:
        ratio, target = row["ratio"], row["target"]
        assert row["met"] == (ratio >= target if row["at_least"] else ratio <= target)


def test_bench_documents_every_ratio():
    page = (ROOT / "docs/performance.md").read_text()
    assert all(f"`{name}`" in page for name in TARGETS)


@pytest.mark.parametrize(
    ("name", "over", "under"),
    [
        ("mobilenet", "float32", "plain"),
        ("training_1", "fedspd", "plain"),
        ("second_worker", "fedspd", "plain"),
        ("small_20", "fedspd", "plain"),
        ("round", "round", "passes"),
        ("growth", "clients_200", "clients_20"),
        ("start", "first_step", "import_torch"),
    ],
)
def test_bench_ratio_is_that_of_the_numbers_beside_it(report, name, over, under):
    """With one turn, a median is the turn itself."""
    (row,) = [row for row in report["rows"] if row["name"] == name]
    quotient = row["numbers"][over] / row["numbers"][under]
    assert row["ratio"] == pytest.approx(quotient, rel=0.01)


def test_bench_round_contains_the_passes_that_it_is_compared_with(report):
    (row,) = [row for row in report["rows"] if row["name"] == "round"]
    assert row["ratio"] >= 1


def test_bench_reports_the_machine_and_the_size(report):
    assert report["machine"]["torch"] == torch.__version__
    assert (report["size"]["clients"], report["size"]["turns"]) == (4, 1)


def test_bench_trains_the_same_parameters_on_both_sides(report):
    """Other batches, another learning rate or another pooling would differ by about 0.01."""
    assert 0 < report["difference"] < 1e-12  # what rounding leaves


def test_result_table_shows_ratio_turns_target_and_whether_it_is_met():
    result = BenchmarkResult.from_turns(
        "round", "a complete round", [1.2, 1.0, 1.4], 1.1, at_least=False, passes=2.0
    )
    console = Console(width=120, file=io.StringIO())
    console.print(result_table([result]))
    (line,) = [line for line in console.file.getvalue().splitlines() if "a complete" in line]
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        "a complete round",
        "1.20",
        "1.00 to 1.40",
        "at most 1.10",
        "no",
    ]
