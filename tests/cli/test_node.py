"""fedspd node, up and network join, as an engineer calls them."""

import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from rich.console import Console

from fedspd.cli.local_network import Lines, table
from fedspd.cli.main import guarded
from fedspd.cli.node import JsonLines
from fedspd.node.identity.manifest import Manifest

PROGRAM = [sys.executable, "-c", "from fedspd.cli.main import main; main()"]
LIMIT = 120.0
ALONE = ["clients=1", "rounds=2", "topology.kind=complete", "data.examples=40", "model.name=linear"]
CONFIG = 'clients = 3\nrounds = 3\n[topology]\nkind = "ring"\n[model]\nname = "linear"\n[data]\nexamples = 30\n'


@pytest.fixture
def plant(here):
    """Three nodes in plant/, at ports that were free."""
    ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    (here / "addresses.toml").write_text(
        "".join(f'node-{i} = "127.0.0.1:{s.getsockname()[1]}"\n' for i, s in enumerate(ports))
    )
    for port in ports:
        port.close()
    (here / "plant.toml").write_text(CONFIG)
    assert guarded(["network", "create", "plant.toml", "--addresses", "addresses.toml"]) == 0
    return here / "plant"


@pytest.fixture
def alone(here):
    """The bundle of a node that has no neighbours."""
    (here / "alone.toml").touch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert (
        guarded(["network", "create", "alone.toml", *ALONE, "--out", "alone", "--port", str(port)])
        == 0
    )
    return here / "alone/nodes/node-0"


@contextmanager
def node(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*PROGRAM, "node", "run", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def status_of(bundle, capsys) -> dict:
    """Of the node, as soon as it can be asked."""
    end = time.monotonic() + LIMIT
    while True:
        capsys.readouterr()
        if guarded(["node", "status", "--bundle", str(bundle), "--json"]) == 0:
            found = json.loads(capsys.readouterr().out)
            if found["running"]:
                return found
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_node_waits_for_its_neighbours_tells_so_and_leaves_when_told(plant, capsys):
    bundle = plant / "nodes/node-0"
    with node("--bundle", str(bundle), "--log", "json") as process:
        found = status_of(bundle, capsys)
        assert (found["node"], found["done"], found["healthy"], found["rounds"]) == (
            "node-0",
            False,
            False,
            3,
        )
        assert {name: known["alive"] for name, known in found["neighbours"].items()} == {
            "node-1": False,
            "node-2": False,
        }
        assert guarded(["node", "status", "--bundle", str(bundle)]) == 0
        assert "node-0: running, round 1 of 3" in capsys.readouterr().out
        assert guarded(["node", "run", "--bundle", str(bundle)]) == 2
        assert "is in use by another process: wait for it, or stop it." in capsys.readouterr().err
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert [sorted(json.loads(line)) for line in said.splitlines()] == [
        ["level", "message", "time"]
    ] * len(said.splitlines())
    assert guarded(["node", "status", "--bundle", str(bundle)]) == 0
    assert "node-0: not running, round 0" in capsys.readouterr().out


def test_a_node_told_to_leave_while_it_starts_leaves_as_told(plant):
    with node("--bundle", str(plant / "nodes/node-0")) as process:
        end = time.monotonic() + LIMIT
        while not (
            plant / "nodes/node-0/state/run.json"
        ).exists():  # data and model are made now, the neighbours not yet waited for
            assert time.monotonic() < end
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT)
    assert process.returncode == 0


def test_from_a_bundle_to_a_model_and_its_answers(alone, here, capsys):
    assert guarded(["node", "run", "--bundle", str(alone)]) == 0
    assert "training finished: node=node-0 rounds=2" in capsys.readouterr().err
    assert guarded(["node", "export", "--bundle", str(alone), "--to", "model.safetensors"]) == 0
    assert capsys.readouterr().out == "model.safetensors\n"
    assert (here / "model.safetensors").stat().st_size > 650 * 4
    np.savez(here / "x.npz", x=np.zeros((3, 1, 8, 8), np.uint8))
    assert guarded(["node", "predict", "--bundle", str(alone), "--data", "x.npz"]) == 0
    classes = capsys.readouterr().out.split()
    assert len(classes) == 3
    assert set(classes) <= set("0123456789")
    assert (
        guarded(["node", "predict", "--bundle", str(alone), "--data", "x.npz", "--out", "y.npz"])
        == 0
    )
    assert [str(row.argmax()) for row in np.load("y.npz")["y"]] == classes


SLIPS = {
    "no bundle": (["node", "run"], 2, "Missing option '--bundle'"),
    "wrong bundle": (["node", "run", "--bundle", "plant"], 2, "--bundle plant: not a node bundle"),
    "plaintext": (
        ["node", "run", "--bundle", "plant/nodes/node-0", "--insecure-plaintext"],
        2,
        "was created with TLS",
    ),
    "log": (
        ["node", "run", "--bundle", "plant/nodes/node-0", "--log", "loud"],
        2,
        "'loud' is not one of",
    ),
    "data": (
        ["node", "run", "--bundle", "plant/nodes/node-0", "--data", "none.npz"],
        2,
        "none.npz",
    ),
    "join": (
        ["network", "join", "--bundle", "plant/nodes/node-0", "--data", "x.npz"],
        2,
        "from its beginning; expected a newcomer",
    ),
    "join without data": (
        ["network", "join", "--bundle", "plant/nodes/node-0"],
        2,
        "Missing option '--data'",
    ),
    "status": (
        ["node", "status", "--bundle", "plant/nodes/node-0"],
        2,
        "--state plant/nodes/node-0/state: no journal of a node",
    ),
    "export": (
        ["node", "export", "--bundle", "plant/nodes/node-0", "--to", "model.pt"],
        2,
        "expected a name that ends in .onnx or",
    ),
    "predict": (
        ["node", "predict", "--bundle", "plant/nodes/node-0", "--data", "x.npz"],
        2,
        "no journal of a node",
    ),
    "up": (
        ["up", "plant.toml", "rounds=4", "--out", "plant"],
        2,
        "a network of another config, which differs in rounds",
    ),
    "up with other nodes": (
        ["up", "plant.toml", "--nodes", "5", "--out", "plant"],
        2,
        "which differs in clients",
    ),
    "up elsewhere": (["up", "plant.toml", "--out", "."], 2, "exists and is not an empty folder"),
    "up star": (["up", "plant.toml", "topology.kind=star"], 2, "peers have no server"),
}


@pytest.mark.parametrize(("words", "code", "sentence"), SLIPS.values(), ids=SLIPS)
def test_a_slip_is_one_line_and_an_exit_code(plant, words, code, sentence, capsys):
    capsys.readouterr()
    assert guarded(words) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedspd: ")]
    assert sentence in line


def test_a_port_in_use_is_a_failure(plant, capsys):
    host, _, port = Manifest.load(plant / "network.json").member("node-0").address.rpartition(":")
    with socket.create_server((host, int(port))):
        assert guarded(["node", "run", "--bundle", "plant/nodes/node-0"]) == 1
        assert f"address = '{host}:{port}': cannot listen there" in capsys.readouterr().err
        assert guarded(["up", "--out", "plant"]) == 1
        assert "is the network up already?" in capsys.readouterr().err


def test_up_of_one_config_ends_with_json_and_is_done_the_second_time(here, capsys):
    assert guarded(["up", *ALONE, "--out", "plant", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["folder"] == "plant"
    assert found["nodes"]["node-0"]["round"] == 3
    assert found["accuracy"] == found["nodes"]["node-0"]["accuracy"]
    assert "1 peers, in 'plant'" in printed.err
    assert "every node has done the final phase" in printed.err
    assert guarded(["up", "--out", "plant"]) == 0
    assert "every node's journal and model: plant/nodes/NAME/state" in capsys.readouterr().out
    assert json.loads((here / "plant/up.json").read_text())["nodes"] == found["nodes"]


def test_a_line_of_json_has_the_traceback_of_a_fault():
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord(
            "fedspd.node", logging.ERROR, "", 0, "it %s", ("failed",), sys.exc_info()
        )
    found = json.loads(JsonLines().format(record))
    assert (found["level"], found["message"], found["traceback"].splitlines()[-1]) == (
        "error",
        "it failed",
        "ValueError: broken",
    )


class Node:
    """What a listener sees of one."""

    def __init__(self, name: str, state: str, last: dict, restarts: int = 0) -> None:
        self.name, self.state, self.last, self.restarts = name, state, last, restarts
        self.process = self
        self.is_done = last.get("event") == "final"

    def poll(self) -> int | None:
        return 1 if self.state.startswith("failed") else None


def test_the_live_table_has_a_row_for_every_node(capsys):
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
    Console(width=100).print(table(nodes, 3))
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["a", "running", "2 of 3", "b", "c", "0.25 0.75", "50.0 %"],
        ["b", "done", "final", "", "", "", ""],
        ["c", "starting", "0 of 3", "", "", "", ""],
    ]


def test_lines_are_few_and_name_who_fails(capsys):
    lines = Lines(Console(width=100), rounds=99)
    for t in range(101):
        lines.show(
            [Node("a", "running", {"round": t}), Node("b", "running", {"round": min(t + 1, 100)})]
        )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "every node has done round 10 of 99"
    assert printed[-1] == "every node has done the final phase"
    assert len(printed) == 10
    for _ in range(3):
        lines.show(
            [
                Node("a", "failed (1)", {"round": 5}),
                Node("b", "running, restarted 1x", {}, restarts=1),
            ]
        )
    assert capsys.readouterr().out.splitlines() == ["a: failed (1)", "b: running, restarted 1x"]
