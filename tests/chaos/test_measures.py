"""The judge is judged: whatever must not happen to a journal is seen, and the table says what was measured."""

import json
from pathlib import Path

import pytest

from chaos import table
from chaos.faults import SCENARIOS, Fault
from chaos.fleet import Fleet, Killed, Seen
from chaos.hosts import Machine
from chaos.measures import late, lost, measured, out_of_order, read, verdict
from fedspd.config import validate

DOCS = Path(__file__).parents[2] / "docs"
FINAL = {"event": "final", "round": 3, "accuracy": 0.75}


def done(round: int, heard: list[str], missing: list[str]) -> dict[str, object]:
    return {"event": "round", "round": round, "received": heard, "missing": missing}


@pytest.fixture
def fleet(tmp_path) -> Fleet:
    """Two nodes with two rounds, of which node-0 did the second without node-1; a round took two seconds."""
    tree = {
        "clients": 2,
        "rounds": 2,
        "topology": {"kind": "complete"},
        "model": {"name": "mlp", "hidden": 4},
    }
    found = Fleet(
        validate(tree),
        tmp_path / "plant",
        [Machine(None, f"127.0.0.1:{port}", "") for port in (7700, 7701)],
    )
    events = {
        "node-0": [done(1, ["node-1"], []), done(2, [], ["node-1"]), FINAL],
        "node-1": [done(1, ["node-0"], []), done(2, ["node-0"], []), FINAL],
    }
    for name, lines in events.items():
        write(found, name, lines)
        found.history += [Seen(10.0 + 2 * i, name, event) for i, event in enumerate(lines)]
    return found


def write(fleet: Fleet, name: str, events: list[dict[str, object]]) -> None:
    journal = fleet.nodes[name].journal
    journal.parent.mkdir(exist_ok=True)
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_what_a_run_came_to(fleet):
    fault = Fault(
        "SIGKILL node-1",
        began=1.0,
        noticed=11.5,
        mended=20.0,
        healed=24.0,
        rounds=2,
        restarted=True,
    )
    assert measured(fleet, 1000, 3, [fault], None) == {
        "accuracy": 75.0,
        "bytes": 1000,
        "resets": 3,
        "seconds_per_round": 2.0,
        "left_out": 25.0,
        "not_done": 0,
        "faults": [{"what": "SIGKILL node-1", "noticed": 10.5, "healed": 4.0, "rounds": 2}],
        "problems": [],
    }


def test_a_committed_round_that_is_gone_is_seen(fleet):
    before = fleet.nodes["node-1"].journal.read_bytes()
    fleet.kills.append(Killed("node-1", before, 0))
    assert lost(fleet) == []
    write(fleet, "node-1", [done(1, [], [])])
    assert len(lost(fleet)) == 1


def test_more_than_one_round_without_a_checkpoint_is_seen(fleet):
    fleet.kills += [Killed("node-1", b"", 1), Killed("node-0", b"", 2)]
    assert lost(fleet) == [
        "node-0 had 2 rounds in its journal and in no checkpoint when it was killed"
    ]


@pytest.mark.parametrize("rounds", [[1, 2, 2], [1, 3, 2]])
def test_a_round_that_was_done_twice_is_seen(fleet, rounds):
    assert out_of_order(read(fleet)) == []
    write(fleet, "node-0", [done(round, [], []) for round in rounds])
    assert len(out_of_order(read(fleet))) == 1


def test_a_restarted_node_that_is_not_heard_soon_is_seen():
    slow = Fault("SIGKILL node-1", 0.0, None, 1.0, 9.0, rounds=3, restarted=True)
    assert late([slow]) == ["SIGKILL node-1: heard again only after 3 rounds"]
    assert late([slow._replace(rounds=2), slow._replace(restarted=False)]) == []


def test_two_points_are_the_limit():
    assert verdict({"accuracy": 93.0, "problems": []}, {"accuracy": 95.0}, judged=True) == []
    assert verdict({"accuracy": 92.9, "problems": []}, {"accuracy": 95.0}, judged=True) == [
        "2.1 points of accuracy lost"
    ]
    assert verdict({"accuracy": 92.9, "problems": ["a"]}, {"accuracy": 95.0}, judged=False) == ["a"]


def test_a_row_of_the_table():
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
        "| a fault | 10 s | 6 s, at most 7 s | 1.5, at most 2 | 1.2 % | 1.00 (0.50) | 2.1 MB (+5.0 %) | 0.5 points of 95.0 % |"
    )


def test_the_table_of_the_docs_is_that_of_the_last_run():
    rows = json.loads((DOCS / "chaos.json").read_text())
    assert [row["name"] for row in rows] == [scenario.name for scenario in SCENARIOS]
    assert table.render(rows) in (DOCS / "reliability.md").read_text()
    assert [row["problems"] for row in rows] == [[]] * len(rows)
