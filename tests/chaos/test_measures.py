"""The results of scenarios: every problem of a journal is found, and the table is right."""

import json
from pathlib import Path

import pytest

from chaos import table
from chaos.faults import SCENARIOS, Fault, rounds_to_recover
from chaos.fleet import Fleet, Kill, Observation
from chaos.hosts import Host
from chaos.measures import (
    find_disordered_rounds,
    find_lost_rounds,
    find_slow_recoveries,
    judge,
    read_journals,
    summarise,
)
from fedspd.config import validate

DOCS = Path(__file__).parents[2] / "docs"
FINAL = {"event": "final", "round": 3, "accuracy": 0.75}


def done(round: int, received: list[str], missing: list[str]) -> dict[str, object]:
    return {"event": "round", "round": round, "received": received, "missing": missing}


@pytest.fixture
def fleet(tmp_path) -> Fleet:
    """Two nodes with two rounds of two seconds; node-0 did the second without node-1."""
    tree = {
        "clients": 2,
        "rounds": 2,
        "topology": {"kind": "complete"},
        "model": {"name": "mlp", "hidden": 4},
    }
    hosts = [Host(None, f"127.0.0.1:{port}", "") for port in (7700, 7701)]
    found = Fleet(validate(tree), tmp_path / "plant", hosts)
    events = {
        "node-0": [done(1, ["node-1"], []), done(2, [], ["node-1"]), FINAL],
        "node-1": [done(1, ["node-0"], []), done(2, ["node-0"], []), FINAL],
    }
    for name, lines in events.items():
        write(found, name, lines)
        found.history += [Observation(10.0 + 2 * i, name, event) for i, event in enumerate(lines)]
    return found


def write(fleet: Fleet, name: str, events: list[dict[str, object]]) -> None:
    journal = fleet.nodes[name].journal
    journal.parent.mkdir(exist_ok=True)
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_summarise_computes_all_results(fleet):
    fault = Fault(
        "SIGKILL node-1",
        began=1.0,
        noticed=11.5,
        mended=20.0,
        healed=24.0,
        rounds=2,
        restarted=True,
    )
    assert summarise(fleet, 1000, 3, [fault], None) == {
        "accuracy": 75.0,
        "bytes": 1000,
        "resets": 3,
        "seconds_per_round": 2.0,
        "left_out": 25.0,
        "not_done": 0,
        "faults": [{"what": "SIGKILL node-1", "noticed": 10.5, "healed": 4.0, "rounds": 2}],
        "problems": [],
    }


def test_find_lost_rounds_finds_a_missing_committed_round(fleet):
    before = fleet.nodes["node-1"].journal.read_bytes()
    fleet.kills.append(Kill("node-1", before, 0))
    assert find_lost_rounds(fleet) == []
    write(fleet, "node-1", [done(1, [], [])])
    assert len(find_lost_rounds(fleet)) == 1


def test_find_lost_rounds_finds_two_rounds_without_a_checkpoint(fleet):
    fleet.kills += [Kill("node-1", b"", 1), Kill("node-0", b"", 2)]
    assert find_lost_rounds(fleet) == [
        "node-0 had 2 rounds in its journal without a checkpoint when it was killed"
    ]


@pytest.mark.parametrize("rounds", [[1, 2, 2], [1, 3, 2]])
def test_find_disordered_rounds_finds_rounds_that_repeat_or_go_back(fleet, rounds):
    assert find_disordered_rounds(read_journals(fleet)) == []
    write(fleet, "node-0", [done(round, [], []) for round in rounds])
    assert len(find_disordered_rounds(read_journals(fleet))) == 1


def test_find_slow_recoveries_finds_a_restart_of_three_rounds():
    slow = Fault("SIGKILL node-1", 0.0, None, 1.0, 9.0, rounds=3, restarted=True)
    assert find_slow_recoveries([slow]) == ["SIGKILL node-1: recovered only after 3 rounds"]
    good = [slow._replace(rounds=2), slow._replace(restarted=False)]
    assert find_slow_recoveries(good) == []


def test_rounds_to_recover_leaves_out_a_first_round_that_was_over_at_the_neighbours(fleet):
    fleet.history = [
        Observation(20.0, "node-0", done(10, [], ["node-1"])),
        Observation(21.0, "node-1", done(10, [], ["node-0"])),
        Observation(22.0, "node-1", done(11, ["node-0"], [])),
        Observation(22.0, "node-0", done(11, [], ["node-1"])),
        Observation(23.0, "node-0", done(12, ["node-1"], [])),
    ]
    assert rounds_to_recover(fleet, "node-1", 20.5) == 2
    del fleet.history[1]
    assert rounds_to_recover(fleet, "node-1", 20.5) == 2


def test_judge_allows_a_loss_of_two_points():
    undisturbed = {"accuracy": 95.0}
    at_limit, below = {"accuracy": 93.0, "problems": []}, {"accuracy": 92.9, "problems": ["a"]}
    assert judge(at_limit, undisturbed, is_judged=True) == []
    assert judge(below, undisturbed, is_judged=True) == ["a", "2.1 points of accuracy lost"]
    assert judge(below, undisturbed, is_judged=False) == ["a"]


def test_table_shows_medians_maxima_and_the_undisturbed_run():
    faults = [
        {"noticed": 10.0, "healed": 5.0, "rounds": 1},
        {"noticed": None, "healed": 7.0, "rounds": 2},
    ]
    calm = {"seconds_per_round": 0.5, "bytes": 2_000_000, "accuracy": 95.0}
    row = {
        "title": "a fault",
        "left_out": 1.25,
        "seconds_per_round": 1.0,
        "bytes": 2_100_000,
        "accuracy": 94.5,
        "faults": faults,
    }
    line = table.render([{**row, "undisturbed": calm}]).splitlines()[-1]
    assert line == (
        "| a fault | 10 | 6, max 7 | 1.5, max 2 | 1.2 | 1.00 (0.50) | 2.1 (2.0) | 0.5 (95.0 %) |"
    )


def test_table_of_the_docs_shows_the_last_run():
    rows = json.loads((DOCS / "chaos.json").read_text())
    assert [row["name"] for row in rows] == [scenario.name for scenario in SCENARIOS]
    assert table.render(rows) in (DOCS / "reliability.md").read_text()
    assert [row["problems"] for row in rows] == [[]] * len(rows)
