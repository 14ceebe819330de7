"""A complete network as processes on this machine, over mutual TLS."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspd.config import ExperimentConfig, validate
from fedspd.core.errors import NodeError, StorageError
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import build_experiment
from fedspd.node.host import export, local_network, provisioning
from fedspd.node.host.bundle import open_bundle
from fedspd.node.identity.manifest import Manifest
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

PROGRAM = [sys.executable, "-c", "from fedspd.cli.main import main; main()"]
TIMEOUT_SECONDS = 600.0  # nothing here takes as long, even on a busy machine
ENDLESS = 1_000_000  # rounds
pytestmark = pytest.mark.timeout(1000)


def build_config(method: str = "fedspd", **changes: Any) -> ExperimentConfig:
    tree = {
        "method": method,
        "clients": 3,
        "clusters": 1 if method in ("fedavg", "local") else 2,
        "rounds": 4,
        "data": {"name": "digits", "examples": 30},
        "topology": {"kind": "ring"},
        "model": {"name": "mlp", "hidden": 8},
    }
    return validate({**tree, **changes})


def read_events(folder: Path, node: int | str) -> list[Json]:
    name = f"node-{node}" if isinstance(node, int) else node
    return list(RunFolder(folder / "nodes" / name / "state").events())


def read_rounds(folder: Path, node: int | str) -> list[int]:
    return [event["round"] for event in read_events(folder, node)]


def received_after(folder: Path, node: int, round: int) -> set[str]:
    """Return the nodes from which a node received models after a round."""
    events = [event for event in read_events(folder, node) if event["round"] > round]
    return {name for event in events for name in event["received"]}


def simulate(config: ExperimentConfig) -> list[list[str]]:
    """Return the hash of every client's state after every round and the final phase."""
    experiment = build_experiment(config)
    engine, found = Simulator(experiment.plan), []
    engine.begin()
    for t in range(1, config.rounds + 1):
        engine.round(t, experiment.topology.at(t))
        found.append(engine.digests())
    engine.finish(config.rounds + 1)
    return [*found, engine.digests()]


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def run_program(*words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_SECONDS)


def find_nodes(process: subprocess.Popen[str]) -> dict[str, int]:
    """Return the process ids of the nodes of a running `fedspd up`, by name."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    words = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in pids}
    return {
        Path(line[line.index("--bundle") + 1]).name: pid
        for pid, line in words.items()
        if "--bundle" in line
    }


@pytest.mark.parametrize(
    "config",
    [
        build_config("fedspd", fedspd={"align_every": 2}),
        pytest.param(build_config("fedem"), marks=pytest.mark.long),
        *(
            pytest.param(build_config(m, clients=5, rounds=6), marks=pytest.mark.long)
            for m in ("fedspd", "fedavg", "fedsoft", "ifca", "pfedme")
        ),
        pytest.param(
            build_config(clients=8, topology={"kind": "er", "degree": 3, "weights": "metropolis"}),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda config: f"{config.method}-{config.clients}-{config.topology.kind}",
)
def test_network_equals_the_simulator_to_the_bit_after_every_round(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    seen: list[int] = []
    local_network.create(config, tmp_path / "plant")
    summary = local_network.up(tmp_path / "plant", config, lambda nodes: seen.append(len(nodes)))
    hashes = [
        [event["hash"] for event in read_events(tmp_path / "plant", i)]
        for i in range(config.clients)
    ]
    expected = simulate(config)
    assert [list(row) for row in zip(*hashes, strict=True)] == expected
    assert [node["hash"] for node in summary["nodes"].values()] == expected[-1]
    assert set(seen) == {config.clients}


@pytest.mark.long
def test_network_survives_a_killed_node_and_continues_after_ctrl_c(tmp_path: Path) -> None:
    """A killed node is restarted; after Ctrl-C all commit; the next start continues there."""
    plant = tmp_path / "plant"
    local_network.create(build_config(rounds=ENDLESS, evaluate_every=1000), plant)
    with run_program("up", "--out", str(plant)) as process:
        wait_until(lambda: all(len(read_rounds(plant, i)) >= 3 for i in range(3)))
        os.kill(find_nodes(process)["node-1"], signal.SIGKILL)
        killed_in = read_rounds(plant, 1)[-1]
        wait_until(lambda: "node-1" in received_after(plant, 0, killed_in + 1))
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert "node-1: running, restarted 1x" in printed
    assert f"Continue with: fedspd up --out {plant}" in printed
    stopped = {i: read_rounds(plant, i) for i in range(3)}
    assert [numbers for numbers in stopped.values() if numbers != sorted(set(numbers))] == []
    with run_program("up", "--out", str(plant)) as process:
        wait_until(lambda: all(len(read_rounds(plant, i)) > len(stopped[i]) + 3 for i in range(3)))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_SECONDS)
    assert [read_rounds(plant, i)[: len(stopped[i])] for i in range(3)] == list(stopped.values())


def test_network_names_a_failed_node_and_its_reason(tmp_path: Path) -> None:
    config = build_config(clients=1, topology={"kind": "complete"})
    local_network.create(config, tmp_path / "plant")
    (tmp_path / "plant/nodes/node-0/node.key").chmod(0o644)
    sentence = r"node-0 failed: '.*node.key': mode = 0644.* \(See '.*nodes/node-0/log.txt'"
    with pytest.raises(NodeError, match=sentence):
        local_network.up(tmp_path / "plant", config, lambda nodes: None)


def test_network_refuses_an_occupied_port_before_any_node_runs(tmp_path: Path) -> None:
    local_network.create(build_config(), tmp_path / "plant")
    address = Manifest.load(tmp_path / "plant/network.json").member("node-2").address
    host, _, port = address.rpartition(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(NodeError, match=f"node-2 cannot listen on {address} .*is the network up"),
    ):
        local_network.up(tmp_path / "plant", build_config(), lambda nodes: None)
    assert list((tmp_path / "plant").glob("nodes/*/log.txt")) == []


def test_network_is_not_continued_with_another_config(tmp_path: Path) -> None:
    stored = build_config()
    local_network.check_same_config(build_config(), stored, tmp_path)
    other = build_config(rounds=5, model={"name": "mlp", "hidden": 9})
    sentence = "a network of another config, which differs in model, rounds; expected the same"
    with pytest.raises(StorageError, match=sentence):
        local_network.check_same_config(other, stored, tmp_path)


def test_network_keeps_its_config(tmp_path: Path) -> None:
    local_network.create(build_config(rounds=7), tmp_path / "plant")
    assert local_network.read_config(tmp_path / "plant") == build_config(rounds=7)


def test_network_needs_all_its_bundles(tmp_path: Path) -> None:
    local_network.create(build_config(), tmp_path / "plant")
    (tmp_path / "plant/nodes/node-1").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="the bundle of node-1 is not in"):
        local_network.up(tmp_path / "plant", build_config(), lambda nodes: None)


def test_last_line_is_the_last_complete_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for text, expected in (
        (b"", b""),
        (b"half", b""),
        (b"one\n", b"one"),
        (b"one\ntwo\nhal", b"two"),
    ):
        path.write_bytes(text)
        assert local_network._last_line(path) == expected
    path.write_bytes(b"x\n" * local_network.TAIL_BYTES + b"last\n")
    assert local_network._last_line(path) == b"last"


@pytest.mark.long
def test_newcomer_joins_running_nodes(tmp_path: Path) -> None:
    plant = tmp_path / "plant"
    local_network.create(build_config(rounds=ENDLESS, evaluate_every=1000), plant)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "new.npz", x=pixels, y=np.arange(20) % 10)
    with run_program("up", "--out", str(plant)) as running:
        wait_until(lambda: all(len(read_rounds(plant, i)) >= 3 for i in range(3)))
        provisioning.add(plant, "new", ["node-0", "node-2"])
        options = ["--bundle", str(plant / "nodes/new"), "--data", str(tmp_path / "new.npz")]
        with run_program("network", "join", *options) as newcomer:
            wait_until(lambda: len(read_rounds(plant, "new")) >= 3)
            wait_until(lambda: all("new" in read_events(plant, i)[-1]["received"] for i in (0, 2)))
            newcomer.send_signal(signal.SIGTERM)
            _, printed = newcomer.communicate(timeout=TIMEOUT_SECONDS)
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=TIMEOUT_SECONDS)
    assert newcomer.returncode == 0
    assert re.search("network joined: node=new neighbours=[12]", printed)
    first = read_events(plant, "new")[0]
    assert first["round"] > 1
    assert set(first["received"]) <= {"node-0", "node-2"}
    assert not any("new" in event["received"] for event in read_events(plant, 1))
    assert export.predict(open_bundle(plant / "nodes/new"), tmp_path / "new.npz").shape == (20, 10)
