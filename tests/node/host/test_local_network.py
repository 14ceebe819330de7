"""A whole network as real processes, over mutual TLS, on this machine."""

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
from fedspd.node.identity.manifest import Manifest
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

PROGRAM = [sys.executable, "-c", "from fedspd.cli.main import main; main()"]
LIMIT = 240.0  # seconds that nothing here takes, however busy the machine is
FOREVER = 1_000_000  # rounds
pytestmark = pytest.mark.timeout(1000)


def config_of(method: str = "fedspd", **changes: Any) -> ExperimentConfig:
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


def events(folder: Path, node: int | str) -> list[Json]:
    name = f"node-{node}" if isinstance(node, int) else node
    return list(RunFolder(folder / "nodes" / name / "state").events())


def rounds(folder: Path, node: int | str) -> list[int]:
    return [event["round"] for event in events(folder, node)]


def simulated(config: ExperimentConfig) -> list[list[str]]:
    """The hash of every client's state after every round, and after the final phase."""
    experiment = build_experiment(config)
    engine, found = Simulator(experiment.plan), []
    engine.begin()
    for t in range(1, config.rounds + 1):
        engine.round(t, experiment.topology.at(t))
        found.append(engine.digests())
    engine.finish(config.rounds + 1)
    return [*found, engine.digests()]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def program(*words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT)


def children(process: subprocess.Popen[str]) -> dict[str, int]:
    """The nodes of a running `fedspd up`, by name."""
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
        config_of("fedspd", fedspd={"align_every": 2}),
        pytest.param(config_of("fedem"), marks=pytest.mark.long),
        *(
            pytest.param(config_of(m, clients=5, rounds=6), marks=pytest.mark.long)
            for m in ("fedspd", "fedavg", "fedsoft", "ifca", "pfedme")
        ),
        pytest.param(
            config_of(clients=8, topology={"kind": "er", "degree": 3, "weights": "metropolis"}),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda config: f"{config.method}-{config.clients}-{config.topology.kind}",
)
def test_what_runs_is_what_was_simulated_to_the_bit_after_every_round(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    seen: list[int] = []
    local_network.create(config, tmp_path / "plant")
    found = local_network.up(tmp_path / "plant", lambda nodes: seen.append(len(nodes)))
    hashes = [
        [event["hash"] for event in events(tmp_path / "plant", i)] for i in range(config.clients)
    ]
    expected = simulated(config)
    assert [list(row) for row in zip(*hashes, strict=True)] == expected
    assert [node["hash"] for node in found["nodes"].values()] == expected[-1]
    assert set(seen) == {config.clients}


@pytest.mark.long
def test_a_node_is_killed_the_network_is_stopped_and_both_go_on(tmp_path: Path) -> None:
    """kill -9 of a node: it is started again and heard again. Ctrl-C: all commit and leave. The same folder: on from there."""
    plant = tmp_path / "plant"
    local_network.create(config_of(rounds=FOREVER, evaluate_every=1000), plant)
    with program("up", "--out", str(plant)) as process:
        until(lambda: all(len(rounds(plant, i)) >= 3 for i in range(3)))
        os.kill(children(process)["node-1"], signal.SIGKILL)
        killed_in = rounds(plant, 1)[-1]
        until(
            lambda: any(
                "node-1" in event["received"]
                for event in events(plant, 0)
                if event["round"] > killed_in + 1
            )
        )
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert "node-1: running, restarted 1x" in said
    assert f"Continue with: fedspd up --out {plant}" in said
    stopped = {i: rounds(plant, i) for i in range(3)}
    assert [numbers for numbers in stopped.values() if numbers != sorted(set(numbers))] == []
    with program("up", "--out", str(plant)) as process:
        until(lambda: all(len(rounds(plant, i)) > len(stopped[i]) + 3 for i in range(3)))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT)
    assert [rounds(plant, i)[: len(stopped[i])] for i in range(3)] == list(stopped.values())


def test_a_node_that_cannot_run_is_named_with_its_reason(tmp_path: Path) -> None:
    config = config_of(clients=1, topology={"kind": "complete"})
    local_network.create(config, tmp_path / "plant")
    (tmp_path / "plant/nodes/node-0/node.key").chmod(0o644)
    with pytest.raises(
        NodeError,
        match=r"node-0 failed: '.*node.key': mode = 0644.* \(Its log is '.*nodes/node-0/log.txt'",
    ):
        local_network.up(tmp_path / "plant", lambda nodes: None)


def test_a_port_that_was_taken_since(tmp_path: Path) -> None:
    local_network.create(config_of(), tmp_path / "plant")
    address = Manifest.load(tmp_path / "plant/network.json").member("node-2").address
    host, _, port = address.rpartition(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(NodeError, match=f"node-2 cannot listen on {address} .*is the network up"),
    ):
        local_network.up(tmp_path / "plant", lambda nodes: None)
    assert list((tmp_path / "plant").glob("nodes/*/log.txt")) == []


def test_a_network_of_another_config_is_not_continued(tmp_path: Path) -> None:
    local_network.create(config_of(), tmp_path / "plant")
    local_network.refuse_other(config_of(), tmp_path / "plant")
    with pytest.raises(
        StorageError,
        match="a network of another config, which differs in model, rounds: give no config to continue it",
    ):
        local_network.refuse_other(
            config_of(rounds=5, model={"name": "mlp", "hidden": 9}), tmp_path / "plant"
        )


def test_a_bundle_that_has_gone_to_its_device(tmp_path: Path) -> None:
    local_network.create(config_of(), tmp_path / "plant")
    (tmp_path / "plant/nodes/node-1").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="The bundle of node-1 is not in"):
        local_network.up(tmp_path / "plant", lambda nodes: None)


def test_the_last_line_is_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for text, expected in (
        (b"", b""),
        (b"half", b""),
        (b"one\n", b"one"),
        (b"one\ntwo\nhal", b"two"),
    ):
        path.write_bytes(text)
        assert local_network._last_line(path) == expected
    path.write_bytes(b"x\n" * local_network.TAIL + b"last\n")
    assert local_network._last_line(path) == b"last"


@pytest.mark.long
def test_a_newcomer_joins_between_running_nodes(tmp_path: Path) -> None:
    plant = tmp_path / "plant"
    local_network.create(config_of(rounds=FOREVER, evaluate_every=1000), plant)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "new.npz", x=pixels, y=np.arange(20) % 10)
    with program("up", "--out", str(plant)) as running:
        until(lambda: all(len(rounds(plant, i)) >= 3 for i in range(3)))
        provisioning.add(plant, "new", ["node-0", "node-2"])
        with program(
            "network",
            "join",
            "--bundle",
            str(plant / "nodes/new"),
            "--data",
            str(tmp_path / "new.npz"),
        ) as newcomer:
            until(lambda: len(rounds(plant, "new")) >= 3)
            until(lambda: all("new" in events(plant, i)[-1]["received"] for i in (0, 2)))
            newcomer.send_signal(signal.SIGTERM)
            _, said = newcomer.communicate(timeout=LIMIT)
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=LIMIT)
    assert newcomer.returncode == 0
    assert re.search("joined with the models of [12] neighbours", said)
    first = events(plant, "new")[0]
    assert first["round"] > 1
    assert set(first["received"]) <= {"node-0", "node-2"}
    assert not any("new" in event["received"] for event in events(plant, 1))
    assert export.predict(plant / "nodes/new", tmp_path / "new.npz").shape == (20, 10)
