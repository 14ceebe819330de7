"""The commands of `fedspd node`, and `fedspd network join`."""

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

from chaos.hosts import free_addresses
from fedspd.cli.main import execute
from fedspd.cli.node import JsonFormatter
from fedspd.node.identity.manifest import Manifest

PROGRAM = [sys.executable, "-c", "from fedspd.cli.main import main; main()"]
TIMEOUT = 600.0  # seconds
ALONE = ["clients=1", "rounds=2", "topology.kind=complete", "data.examples=40", "model.name=linear"]
CONFIG = """
clients = 3
rounds = 3
[topology]
kind = "ring"
[model]
name = "linear"
[data]
examples = 30
"""


@pytest.fixture
def plant(here):
    """A network of three nodes in plant/."""
    lines = [f'node-{i} = "{address}"\n' for i, address in enumerate(free_addresses(3))]
    (here / "addresses.toml").write_text("".join(lines))
    (here / "plant.toml").write_text(CONFIG)
    assert execute(["network", "create", "plant.toml", "--addresses", "addresses.toml"]) == 0
    return here / "plant"


@pytest.fixture
def alone(here):
    """The bundle of a node without neighbours."""
    (here / "alone.toml").touch()
    host, _, port = free_addresses(1)[0].rpartition(":")
    place = ["--out", "alone", "--host", host, "--port", port]
    create = ["network", "create", "alone.toml", *ALONE, *place]
    assert execute(create) == 0
    return here / "alone/nodes/node-0"


@contextmanager
def run_node(*options: str) -> Iterator[subprocess.Popen[str]]:
    command, pipe = [*PROGRAM, "node", "run", *options], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_status(bundle, capsys) -> dict:
    """Return the status of a node once it answers."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        capsys.readouterr()
        if execute(["node", "status", "--bundle", str(bundle), "--json"]) == 0:
            found = json.loads(capsys.readouterr().out)
            if found["running"]:
                return found
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_node_shows_its_status_while_it_waits_and_stops_on_sigterm(plant, capsys):
    bundle = plant / "nodes/node-0"
    with run_node("--bundle", str(bundle), "--log", "json") as process:
        found = wait_for_status(bundle, capsys)
        assert (found["node"], found["rounds"]) == ("node-0", 3)
        assert (found["done"], found["healthy"]) == (False, False)
        alive = {name: known["alive"] for name, known in found["neighbours"].items()}
        assert alive == {"node-1": False, "node-2": False}
        assert execute(["node", "status", "--bundle", str(bundle)]) == 0
        assert "node-0: running, round 1 of 3" in capsys.readouterr().out
        assert execute(["node", "run", "--bundle", str(bundle)]) == 2
        assert "in use by another process" in capsys.readouterr().err
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    lines = [sorted(json.loads(line)) for line in log.splitlines()]
    assert lines == [["level", "message", "time"]] * len(lines)
    assert json.loads(log.splitlines()[-1])["message"] == "node stopped: node=node-0 round=0"
    assert execute(["node", "status", "--bundle", str(bundle)]) == 0
    assert "node-0: not running, round 0" in capsys.readouterr().out


def test_node_that_is_interrupted_while_it_starts_exits_with_0(plant):
    with run_node("--bundle", str(plant / "nodes/node-0")) as process:
        deadline = time.monotonic() + TIMEOUT
        # The journal is created before the data and the model.
        while not (plant / "nodes/node-0/state/run.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0


def test_node_trains_exports_and_predicts(alone, here, capsys):
    assert execute(["node", "run", "--bundle", str(alone)]) == 0
    assert "training finished: node=node-0 rounds=2 rounds_alone=2" in capsys.readouterr().err
    assert execute(["node", "export", "--bundle", str(alone), "--to", "model.safetensors"]) == 0
    assert capsys.readouterr().out == "model.safetensors\n"
    assert (here / "model.safetensors").stat().st_size > 650 * 4
    np.savez(here / "x.npz", x=np.zeros((3, 1, 8, 8), np.uint8))
    predict = ["node", "predict", "--bundle", str(alone), "--data", "x.npz"]
    assert execute(predict) == 0
    classes = capsys.readouterr().out.split()
    assert len(classes) == 3
    assert set(classes) <= set("0123456789")
    assert execute([*predict, "--out", "y.npz"]) == 0
    assert [str(row.argmax()) for row in np.load("y.npz")["y"]] == classes


BUNDLE = ["--bundle", "plant/nodes/node-0"]
MISTAKES = {
    "no bundle": (["node", "run"], "Missing option '--bundle'"),
    "wrong bundle": (["node", "run", "--bundle", "plant"], "--bundle plant: not a node bundle"),
    "plaintext": (["node", "run", *BUNDLE, "--insecure-plaintext"], "was created with TLS"),
    "log": (["node", "run", *BUNDLE, "--log", "loud"], "'loud' is not one of"),
    "data": (["node", "run", *BUNDLE, "--data", "none.npz"], "none.npz"),
    "join": (["network", "join", *BUNDLE, "--data", "x.npz"], "expected a newcomer"),
    "join without data": (["network", "join", *BUNDLE], "Missing option '--data'"),
    "status": (
        ["node", "status", *BUNDLE],
        "--state plant/nodes/node-0/state: no journal of a node",
    ),
    "export": (["node", "export", *BUNDLE, "--to", "model.pt"], "ends in .onnx or"),
    "predict": (["node", "predict", *BUNDLE, "--data", "x.npz"], "no journal of a node"),
}


@pytest.mark.parametrize(("words", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_node_reports_a_mistake_in_one_line(plant, words, sentence, capsys):
    capsys.readouterr()
    assert execute(words) == 2
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("fedspd: ")]
    assert sentence in line


def test_node_reports_a_port_in_use_as_a_failure(plant, capsys):
    host, _, port = Manifest.load(plant / "network.json").member("node-0").address.rpartition(":")
    with socket.create_server((host, int(port))):
        assert execute(["node", "run", *BUNDLE]) == 1
        assert f"address = '{host}:{port}': cannot listen there" in capsys.readouterr().err


def test_json_formatter_includes_the_traceback():
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord(
            "fedspd.node", logging.ERROR, "", 0, "it %s", ("failed",), sys.exc_info()
        )
    found = json.loads(JsonFormatter().format(record))
    assert (found["level"], found["message"]) == ("error", "it failed")
    assert found["traceback"].splitlines()[-1] == "ValueError: broken"
