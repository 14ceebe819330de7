"""The benchmark of the peers measures what it says; how fast this machine is today is not tested."""

import json
import subprocess
import sys

import pytest

from fedspd.bench.peers import _seconds_per_round


def test_the_first_rounds_and_the_last_are_left_out():
    said = [(1, 0.0), (2, 10.0), (3, 12.0), (4, 14.0), (5, 17.0), (6, 99.0)]
    assert _seconds_per_round(said, last=6) == 2.0


def test_two_rounds_seen_at_one_glance_count_as_two():
    assert _seconds_per_round([(2, 10.0), (4, 14.0), (5, 16.0)], last=6) == 2.0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_command_ends_with_one_row():
    program = "from fedspd.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "bench", "--peers", "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["name"], row["target"], row["at_least"]) == ("peers", 1.5, False)
    assert row["ratio"] == pytest.approx(
        row["numbers"]["peers"] / row["numbers"]["simulator"], rel=0.01
    )
