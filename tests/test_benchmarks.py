"""The benchmark runs and reports; how fast this machine is today is not tested."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = Path(__file__).parents[1] / "benchmarks" / "training.py"


@pytest.fixture(scope="module")
def report() -> dict:
    done = subprocess.run([sys.executable, TRAINING, "--quick", "--json"], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_training_reports_speeds_and_ratio_for_one_and_two_processes(report):
    assert [row["workers"] for row in report["results"]] == [1, 2]
    for row in report["results"]:
        for name in ("fedspd", "plain", "ratio", "lowest", "highest"):
            assert math.isfinite(row[name])
            assert row[name] > 0
        assert row["ratio"] == pytest.approx(row["fedspd"] / row["plain"], rel=0.01)
    assert report["target"] == 0.85


def test_both_sides_of_the_comparison_train_the_same_parameters(report):
    """Other batches or another dropout would differ by about 0.01."""
    assert report["difference"] < 1e-5
