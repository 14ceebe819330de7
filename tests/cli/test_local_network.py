"""The command `fedspd up`."""

import json
import socket

import pytest
from rich.console import Console

from fedspd.cli.local_network import ProgressLines, build_table
from fedspd.cli.main import execute

ALONE = ["clients=1", "rounds=2", "topology.kind=complete", "data.examples=40", "model.name=linear"]
CONFIG = 'clients = 3\nrounds = 3\n[topology]\nkind = "ring"\n[model]\nname = "linear"\n'


@pytest.fixture
def plant(here):
    """A network of three nodes in plant/, made from plant.toml."""
    (here / "plant.toml").write_text(CONFIG)
    assert execute(["network", "create", "plant.toml"]) == 0
    return here / "plant"


MISTAKES = {
    "another config": (["plant.toml", "rounds=4", "--out", "plant"], "which differs in rounds"),
    "other nodes": (["plant.toml", "--nodes", "5", "--out", "plant"], "which differs in clients"),
    "another folder": (["plant.toml", "--out", "."], "not an empty folder"),
    "star": (["plant.toml", "topology.kind=star"], "peers have no server"),
}


@pytest.mark.parametrize(("words", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_up_reports_a_mistake_in_one_line(plant, words, sentence, capsys):
    capsys.readouterr()
    assert execute(["up", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedspd: ")
    assert sentence in line


def test_up_reports_a_port_in_use_as_a_failure(here, capsys):
    (here / "plant.toml").write_text(CONFIG)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert execute(["network", "create", "plant.toml", "--port", port]) == 0
        assert execute(["up", "--out", "plant"]) == 1
        sentence = f"node-0 cannot listen on 127.0.0.1:{port} (Address already in use)"
        assert sentence in capsys.readouterr().err


def test_up_ends_with_json_and_finishes_at_once_the_second_time(here, capsys):
    assert execute(["up", *ALONE, "--out", "plant", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["folder"] == "plant"
    assert found["nodes"]["node-0"]["round"] == 3
    assert found["accuracy"] == found["nodes"]["node-0"]["accuracy"]
    assert "1 peers in 'plant'" in printed.err
    assert "every node has finished the final phase" in printed.err
    assert execute(["up", "--out", "plant"]) == 0
    assert "journals and models: plant/nodes/NAME/state" in capsys.readouterr().out
    assert json.loads((here / "plant/up.json").read_text())["nodes"] == found["nodes"]


class Node:
    """A node process as a listener sees it."""

    def __init__(self, name: str, state: str, last: dict, restarts: int = 0) -> None:
        self.name, self.state, self.last, self.restarts = name, state, last, restarts
        self.process = self
        self.is_done = last.get("event") == "final"

    def poll(self) -> int | None:
        return 1 if self.state.startswith("failed") else None


def test_table_has_a_row_for_every_node(capsys):
    last = {
        "event": "round",
        "round": 2,
        "received": ["b"],
        "missing": ["c"],
        "mixture": [0.25, 0.75],
        "accuracy": 0.5,
    }
    nodes = [
        Node("a", "running", last),
        Node("b", "done", {"event": "final", "round": 4}),
        Node("c", "starting", {}),
    ]
    Console(width=100).print(build_table(nodes, 3))
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["a", "running", "2 of 3", "b", "c", "0.25 0.75", "50.0"],
        ["b", "done", "final", "", "", "", ""],
        ["c", "starting", "0 of 3", "", "", "", ""],
    ]


def test_table_shows_the_rmse_of_a_regression(capsys):
    last = {"event": "round", "round": 2, "accuracy": None, "test_loss": 1.0, "rmse": 1.25}
    Console(width=100).print(build_table([Node("c", "starting", {}), Node("a", "up", last)], 3))
    out = capsys.readouterr().out
    assert "RMSE" in out
    assert "1.25" in out
    assert "accuracy" not in out


def test_progress_lines_are_ten_and_name_failed_nodes(capsys):
    lines = ProgressLines(Console(width=100), rounds=99)
    for t in range(101):
        ahead = {"round": min(t + 1, 100)}
        lines.show([Node("a", "running", {"round": t}), Node("b", "running", ahead)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "every node has finished round 10 of 99"
    assert printed[-1] == "every node has finished the final phase"
    assert len(printed) == 10
    failed = Node("a", "failed (1)", {"round": 5})
    restarted = Node("b", "running, restarted 1x", {}, restarts=1)
    for _ in range(3):
        lines.show([failed, restarted])
    assert capsys.readouterr().out.splitlines() == ["a: failed (1)", "b: running, restarted 1x"]
