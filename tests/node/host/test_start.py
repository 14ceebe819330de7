"""The way from a bundle to a running peer, and the reasons to refuse one."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspd.config import ExperimentConfig, validate
from fedspd.core.errors import ConfigError, DataError, FedspdError, NodeError, StorageError
from fedspd.node.host import plan, provisioning, start
from fedspd.node.host.bundle import open_bundle
from fedspd.node.host.local_network import PROGRAM
from fedspd.node.identity.credentials import Authority
from fedspd.node.identity.manifest import Manifest
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import Timeouts
from fedspd.runtime.plan import Plan
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

SHORT = Timeouts(
    start=0.2,
    min_deadline=0.2,
    max_deadline=0.2,
    heartbeat_interval=0.1,
    down_after=0.2,
    linger=0.1,
)
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8), dtype=np.uint8)
LABELS = np.arange(20) % 10
MODEL = """
from torch import nn

def make(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""
RING = {"clients": 3, "topology": {"kind": "ring"}}


def run(folder: Path, **options: Any) -> None:
    start.run(open_bundle(folder), **options)


def write_data(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "own.npz", **arrays)
    return str(folder / "own.npz")


def open_journal(folder: Path) -> Journal:
    return Journal(folder / "state", open_bundle(folder).owner)


def read_events(folder: Path) -> list[Json]:
    return list(RunFolder(folder / "state").events())


def committed_round(folder: Path) -> int:
    return int(RunFolder(folder / "state").read("result.json")["round"])


@contextmanager
def occupied(address: str) -> Iterator[None]:
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))):
        yield


def test_node_with_own_data_runs_every_round_without_neighbours(
    plant: Path, tmp_path: Path
) -> None:
    data = write_data(tmp_path, x=PIXELS, y=LABELS)
    run(plant / "nodes/a", data=data, timeouts=SHORT)
    events = read_events(plant / "nodes/a")
    assert [event["round"] for event in events] == [1, 2, 3, 4]
    assert [event["missing"] for event in events[:3]] == [["b", "d"]] * 3
    assert events[-1]["event"] == "final"
    run(plant / "nodes/a", data=data, timeouts=SHORT)  # has nothing left to do
    assert read_events(plant / "nodes/a") == events


# ---- bundles


def test_node_parses_the_config_of_its_bundle_once(
    plant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []
    parse = ExperimentConfig.model_validate

    def count(tree: Any, **options: Any) -> ExperimentConfig:
        parsed.append(tree)
        return parse(tree, **options)

    monkeypatch.setattr(ExperimentConfig, "model_validate", count)
    run(plant / "nodes/a", timeouts=SHORT)
    assert len(parsed) == 1


@pytest.mark.parametrize("name", ["node.key", "node.crt", "ca.crt", "revoked.crl", "manifest.json"])
def test_node_refuses_a_damaged_file(plant: Path, name: str) -> None:
    (plant / "nodes/a" / name).write_text("damaged\n")
    with pytest.raises(FedspdError, match=name) as refused:
        run(plant / "nodes/a")
    assert refused.value.exit_code == 2


def test_node_refuses_a_manifest_without_its_neighbour(plant: Path) -> None:
    provisioning.add(plant, "x", ["a"])
    provisioning.add(plant, "new", ["a", "x"])
    manifest = Manifest.load(plant / "nodes/new/manifest.json")
    known = [
        replace(member, neighbours=tuple(name for name in member.neighbours if name != "x"))
        for member in manifest.members
        if member.name != "x"
    ]
    signed = Authority.load(plant).sign(replace(manifest, members=tuple(known)))
    signed.save(plant / "nodes/new/manifest.json")
    with pytest.raises(StorageError, match=r"does not know 'x', a neighbour .* Copy the bundle"):
        run(plant / "nodes/new")


# ---- data


WRONG_DATA = {
    "shape": (
        {"x": PIXELS[:, :, :5], "y": LABELS},
        r"has examples of shape \(1, 5, 8\); expected \(1, 8, 8\)",
    ),
    "classes": (
        {"x": PIXELS, "y": np.arange(20) % 12},
        "data of 12 classes; expected 10 classes",
    ),
    "not finite": (
        {"x": PIXELS + np.inf, "y": LABELS},
        "example 0 is not finite",
    ),
    "regression": (
        {"x": PIXELS, "y": np.linspace(0, 1, 20)},
        "data of a regression; expected 10 classes",
    ),
    "few": (
        {"x_train": PIXELS[:2], "y_train": np.array([0, 1])},
        "1 training examples; expected at least 2, one for each cluster",
    ),
}


@pytest.mark.parametrize(("arrays", "sentence"), WRONG_DATA.values(), ids=WRONG_DATA)
def test_node_refuses_data_that_do_not_fit(
    plant: Path, tmp_path: Path, arrays: dict[str, Any], sentence: str
) -> None:
    data = write_data(tmp_path, **arrays)
    with pytest.raises(DataError, match=rf"^--data {re.escape(data)}: .*{sentence}"):
        run(plant / "nodes/a", data=data)


def test_node_does_not_train_on_data_of_another_shape_than_its_network(tmp_path: Path) -> None:
    """Without [data], a config means digits, 8 x 8; the network is for images of 28 x 28."""
    provisioning.create(validate(RING), tmp_path / "plant", example=((1, 28, 28), 10))
    sentence = r"data.name = 'digits': .* expected examples of shape \(1, 28, 28\) for 10 classes"
    with pytest.raises(DataError, match=sentence):
        run(tmp_path / "plant/nodes/node-0", timeouts=SHORT)


def test_node_does_not_take_a_column_of_targets_for_numbers(tmp_path: Path) -> None:
    """The loss of outputs [n] against targets [n, 1] would be that of every pair."""
    provisioning.create(validate(RING), tmp_path / "plant", example=((3,), 0))
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    data = write_data(tmp_path, x=x, y=x[:, :1])
    with pytest.raises(ConfigError, match=r"\(2,\); expected \(2, 1\), the shape of the targets"):
        run(tmp_path / "plant/nodes/node-0", data=data, timeouts=SHORT)


def test_node_takes_data_of_fewer_classes_than_its_network(
    plant: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fedspd.node")
    data = write_data(tmp_path, x=PIXELS, y=np.arange(20) % 3)
    run(plant / "nodes/a", data=data, timeouts=SHORT)
    assert committed_round(plant / "nodes/a") == 3
    first = caplog.messages[0]
    assert first.startswith("node started: node=a version=")
    assert first.endswith("examples=16")  # four of the twenty are for the test
    assert "expires soon" not in caplog.text


def test_node_warns_of_a_certificate_that_expires_soon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    provisioning.create(validate({**RING, "rounds": 1}), tmp_path / "plant", days=12)
    run(tmp_path / "plant/nodes/node-0", timeouts=SHORT)
    (line,) = [each for each in caplog.messages if "expires soon" in each]
    assert line.endswith(" days=11")  # and 23 hours


def test_node_stops_for_a_signal_that_was_lost_before_the_first_round(
    plant: Path, monkeypatch: pytest.MonkeyPatch, loses_ctrl_c: Any
) -> None:
    def build_plan(*arguments: Any) -> Plan:
        loses_ctrl_c("start").on_start({"event": "start"})
        return plan.build_plan(*arguments)

    monkeypatch.setattr(start, "build_plan", build_plan)
    with pytest.raises(KeyboardInterrupt):
        run(plant / "nodes/a", timeouts=SHORT)
    assert read_events(plant / "nodes/a") == []


# ---- journals


def test_node_refuses_the_journal_of_another_node_or_network(plant: Path, tmp_path: Path) -> None:
    open_journal(plant / "nodes/b").close()
    sentence = r"belongs to another node \(b, not a\); .* Give one with --state"
    with pytest.raises(StorageError, match=sentence):
        run(plant / "nodes/a", state=plant / "nodes/b/state")
    provisioning.create(open_bundle(plant / "nodes/b").config, tmp_path / "other")
    with pytest.raises(StorageError, match="belongs to another network"):
        run(tmp_path / "other/nodes/node-1", state=plant / "nodes/b/state")


def test_node_refuses_a_state_folder_that_is_not_a_journal(plant: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(StorageError, match=r"not a journal of a node; .* Give another one with"):
        run(plant / "nodes/a", state=tmp_path / "photos")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_node_continues_a_journal_that_was_copied_without_hidden_files(plant: Path) -> None:
    run(plant / "nodes/a", timeouts=SHORT)
    (plant / "nodes/a/state/.lock").unlink()
    run(plant / "nodes/a", timeouts=SHORT)
    assert committed_round(plant / "nodes/a") == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_node_in_a_read_only_bundle_asks_for_another_folder(plant: Path) -> None:
    (plant / "nodes/a").chmod(0o500)
    with pytest.raises(StorageError, match=r"cannot write to .*nodes/a'; .* Give one with --state"):
        run(plant / "nodes/a")


def test_node_refuses_a_journal_that_another_process_has_locked(plant: Path) -> None:
    journal = open_journal(plant / "nodes/a")
    try:
        with pytest.raises(StorageError, match="is in use by another process"):
            run(plant / "nodes/a")
    finally:
        journal.close()


def test_journal_error_of_the_disk_says_how_to_continue(plant: Path) -> None:
    journal = open_journal(plant / "nodes/a")
    (plant / "nodes/a/state/events.jsonl").mkdir()
    try:
        with pytest.raises(StorageError, match=r"could not be written \(.*start the node again"):
            journal.run_folder.append({"round": 1})
    finally:
        journal.close()


# ---- network


def test_node_refuses_an_occupied_port(plant: Path) -> None:
    address = Manifest.load(plant / "network.json").member("a").address
    sentence = f"address = '{address}': cannot listen there .Address already in use.;"
    with occupied(address), pytest.raises(NodeError, match=sentence):
        run(plant / "nodes/a")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(NodeError, match=f"--status-port {port}: cannot be used"):
            run(plant / "nodes/a", status_port=port)


def test_node_refuses_to_listen_on_something_else_than_an_address(plant: Path) -> None:
    with pytest.raises(ConfigError, match="address = 'everywhere': not an address; expected host"):
        run(plant / "nodes/a", listen="everywhere")


def test_plaintext_needs_a_network_that_was_created_for_it(plant: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--insecure-plaintext: this network was created with TLS"
    ):
        run(plant / "nodes/a", insecure_plaintext=True)
    config = open_bundle(plant / "nodes/a").config
    provisioning.create(config, tmp_path / "open", secure=False, port=1)
    with pytest.raises(ConfigError, match="created without TLS; expected the option --insecure"):
        run(tmp_path / "open/nodes/node-0")


def test_newcomer_needs_data_and_a_live_neighbour(plant: Path, tmp_path: Path) -> None:
    provisioning.add(plant, "new", ["a", "b"])
    with pytest.raises(DataError, match=r"brings its own; .* Give them with --data"):
        run(plant / "nodes/new")
    data = write_data(tmp_path, x=PIXELS, y=LABELS)
    with pytest.raises(NodeError, match="No neighbour gave its models to this newcomer"):
        run(plant / "nodes/new", data=data, joining=True, timeouts=SHORT)
    with pytest.raises(ConfigError, match=r"from its beginning; .* with 'fedspd node run'"):
        run(plant / "nodes/a", joining=True)


def test_node_does_not_need_the_graph_file_of_the_operator(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n")
    tree = {
        "clients": 2,
        "rounds": 1,
        "topology": {"kind": "file", "file": str(tmp_path / "edges.txt")},
        "model": {"name": "linear"},
    }
    provisioning.create(validate(tree), tmp_path / "plant")
    (tmp_path / "edges.txt").unlink()
    data = write_data(tmp_path, x=PIXELS, y=LABELS)
    run(tmp_path / "plant/nodes/node-1", data=data, timeouts=SHORT)
    assert committed_round(tmp_path / "plant/nodes/node-1") == 1


def test_node_does_not_wait_for_a_revoked_neighbour(plant: Path, tmp_path: Path) -> None:
    for name in ("b", "d"):
        provisioning.revoke(plant, name)
    data = write_data(tmp_path, x=PIXELS, y=LABELS)
    run(plant / "nodes/a", data=data, timeouts=Timeouts(start=100_000))  # longer than any test
    assert [event.get("missing", []) for event in read_events(plant / "nodes/a")] == [[]] * 4


def test_node_refuses_an_older_revocation_list_after_a_restart(plant: Path) -> None:
    folder = plant / "nodes/a"
    old = (folder / "revoked.crl").read_bytes()
    provisioning.revoke(plant, "c")
    run(folder, timeouts=SHORT)
    (folder / "revoked.crl").write_bytes(old)
    with pytest.raises(StorageError, match="number = 0 is older than the list in use"):
        run(folder, timeouts=SHORT)


@pytest.mark.parametrize(
    "program", [["-c", PROGRAM], pytest.param(["-m", "fedspd"], marks=pytest.mark.long)]
)
def test_node_does_not_import_code_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: list[str]
) -> None:
    """The operator's machine has the module; the device has a file of that name beside it."""
    package, here = tmp_path / "package", tmp_path / "here"
    for folder, code in ((package, MODEL), (here, "raise SystemExit('imported')")):
        folder.mkdir()
        (folder / "pwn.py").write_text(code)
    monkeypatch.syspath_prepend(package)
    config = validate({**RING, "data": {"name": "digits"}, "model": {"name": "pwn:make"}})
    provisioning.create(config, tmp_path / "plant")
    command = [sys.executable, *program, "node", "run", "--bundle", "../plant/nodes/node-0"]
    found = subprocess.run(command, cwd=here, capture_output=True, text=True)
    assert (found.returncode, "imported" in found.stderr) == (2, False)
    assert "model.name = 'pwn:make': the module is not installed; a node uses no" in found.stderr
