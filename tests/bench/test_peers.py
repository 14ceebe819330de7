"""The benchmark of real peers; the machine's speed is not tested."""

import json
import subprocess
import sys

import pytest

from fedspd.bench.peers import _seconds_per_round


def test_seconds_per_round_leave_out_the_warm_up_and_the_last_round():
    ends = [(1, 0.0), (2, 10.0), (3, 12.0), (4, 14.0), (5, 17.0), (6, 99.0)]
    assert _seconds_per_round(ends, last=6) == 2.0


def test_seconds_per_round_divide_by_rounds_that_were_seen_at_once():
    assert _seconds_per_round([(2, 10.0), (4, 14.0), (5, 16.0)], last=6) == 2.0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_bench_of_peers_ends_with_one_row():
    done = subprocess.run(
        [sys.executable, "-m", "fedspd", "bench", "--peers", "--quick", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["name"], row["target"], row["at_least"]) == ("peers", 1.5, False)
    quotient = row["numbers"]["peers"] / row["numbers"]["simulator"]
    assert row["ratio"] == pytest.approx(quotient, rel=0.01)
