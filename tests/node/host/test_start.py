"""From a bundle to a running peer: what is refused, and why."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspd.config import validate
from fedspd.core.errors import ConfigError, DataError, FedspdError, NodeError, StorageError
from fedspd.node.host import provisioning, start
from fedspd.node.identity.manifest import Manifest
from fedspd.node.peer.journal import Journal
from fedspd.node.peer.liveness import Timeouts
from fedspd.storage.run_folder import RunFolder

SOON = Timeouts(start=0.2, least=0.2, most=0.2, beat=0.1, silence=0.2, leave=0.1)
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8), dtype=np.uint8)


def data_file(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "own.npz", **arrays)
    return str(folder / "own.npz")


def journal_of(bundle: Path, name: str) -> Journal:
    manifest = Manifest.load(bundle / "manifest.json")
    return Journal(
        bundle / "state",
        {"network": manifest.network, "node": name, "agreement": manifest.agreement},
    )


@contextmanager
def taken(address: str) -> Iterator[None]:
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))):
        yield


def test_a_node_with_data_of_its_own_lives_through_every_round_though_nobody_comes(
    plant: Path, tmp_path: Path
) -> None:
    data = data_file(tmp_path, x=PIXELS, y=np.arange(20) % 10)
    start.run(plant / "nodes/a", data=data, patience=SOON)
    events = list(RunFolder(plant / "nodes/a/state").events())
    assert [event["round"] for event in events] == [1, 2, 3, 4]
    assert [event["missing"] for event in events[:3]] == [["b", "d"]] * 3
    assert events[-1]["event"] == "final"
    start.run(plant / "nodes/a", data=data, patience=SOON)  # there is nothing left to do
    assert list(RunFolder(plant / "nodes/a/state").events()) == events


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(
        StorageError, match=r"is no bundle of a node, as there is no manifest\.json in it"
    ):
        start.run(tmp_path)
    with pytest.raises(
        StorageError, match=r"manifest\.json': cannot be read \(File name too long\)"
    ):
        start.run(tmp_path / (300 * "a"))


@pytest.mark.parametrize("name", ["node.key", "node.crt", "ca.crt", "revoked.crl"])
def test_a_bundle_that_lacks_a_file(plant: Path, name: str) -> None:
    (plant / "nodes/a" / name).unlink()
    with pytest.raises(
        StorageError, match=f"The bundle '.*' lacks {name}: copy the whole folder again"
    ):
        start.run(plant / "nodes/a")


@pytest.mark.parametrize("name", ["node.key", "node.crt", "ca.crt", "revoked.crl", "manifest.json"])
def test_a_bundle_with_a_damaged_file(plant: Path, name: str) -> None:
    (plant / "nodes/a" / name).write_text("rubbish\n")
    with pytest.raises(FedspdError, match=name) as refused:
        start.run(plant / "nodes/a")
    assert refused.value.exit_code == 2


def test_a_bundle_whose_certificate_is_no_node_s(plant: Path) -> None:
    bundle = plant / "nodes/a"
    shutil.copy(bundle / "ca.crt", bundle / "node.crt")
    with pytest.raises(
        StorageError,
        match=r"a/node\.crt': not the certificate of a node; .* Copy the complete bundle again",
    ):
        start.run(bundle)


def test_a_bundle_whose_config_is_wrong(plant: Path) -> None:
    path = plant / "nodes/a/manifest.json"
    tree = json.loads(path.read_text())
    for wrong, sentence in (
        ({}, "config.clusters = null"),
        ({"rounds": 0}, "config: rounds = 0"),
        ({"roundz": 1}, "'roundz'"),
    ):
        path.write_text(
            json.dumps({**tree, "config": {**tree["config"], **wrong} if wrong else {}})
        )
        with pytest.raises(ConfigError) as refused:
            start.run(plant / "nodes/a")
        assert str(refused.value).startswith(f"'{path}': ")
        assert sentence in str(refused.value)


def test_a_bundle_whose_files_do_not_belong_together(plant: Path, tmp_path: Path) -> None:
    provisioning.add(plant, "x", ["a"])
    provisioning.add(plant, "new", ["a", "x"])
    manifest = Manifest.load(plant / "nodes/new/manifest.json")
    known = [
        replace(m, neighbours=tuple(n for n in m.neighbours if n != "x"))
        for m in manifest.members
        if m.name != "x"
    ]
    replace(manifest, members=tuple(known)).save(plant / "nodes/new/manifest.json")
    with pytest.raises(
        StorageError,
        match=r"manifest\.json does not know 'x', a neighbour of this node: copy the bundle again",
    ):
        start.run(plant / "nodes/new")
    provisioning.create(validate(manifest.config), tmp_path / "other", names=list("abcd"))
    shutil.copy(tmp_path / "other/nodes/a/manifest.json", plant / "nodes/a/manifest.json")
    with pytest.raises(
        StorageError,
        match=r"manifest\.json and node\.crt in the bundle '.*' are of two networks: copy the whole folder",
    ):
        start.run(plant / "nodes/a")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_bundle_of_another_user(plant: Path) -> None:
    (plant / "nodes/a").chmod(0)
    with pytest.raises(
        StorageError,
        match=r"manifest\.json': cannot be read \(Permission denied\)\. Run the command as the user",
    ):
        start.run(plant / "nodes/a")


DATA = {
    "shape": (
        {"x": PIXELS[:, :, :5], "y": np.arange(20) % 10},
        r"has examples of shape \(1, 5, 8\): expected \(1, 8, 8\)",
    ),
    "classes": (
        {"x": PIXELS, "y": np.arange(20) % 12},
        "is data of 12 classes: this network's model is for 10 classes",
    ),
    "regression": (
        {"x": PIXELS, "y": np.linspace(0, 1, 20)},
        "is data of a regression: this network's model is for 10 classes",
    ),
    "few": (
        {"x_train": PIXELS[:2], "y_train": np.array([0, 1])},
        "has 1 examples to train on: expected at least 2, one for each cluster",
    ),
}


@pytest.mark.parametrize(("arrays", "sentence"), DATA.values(), ids=DATA)
def test_data_that_do_not_fit(
    plant: Path, tmp_path: Path, arrays: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        start.run(plant / "nodes/a", data=data_file(tmp_path, **arrays))


def test_a_network_for_data_of_its_nodes_does_not_train_on_others_instead(tmp_path: Path) -> None:
    """Without [data] a config stands for digits, 8 x 8; the network is for images of 28 x 28."""
    provisioning.create(
        validate({"clients": 3, "topology": {"kind": "ring"}}),
        tmp_path / "plant",
        example=((1, 28, 28), 10),
    )
    with pytest.raises(
        DataError,
        match=r"takes examples of shape \(1, 28, 28\) for 10 classes, and data.name = 'digits' has others: give .* --data",
    ):
        start.run(tmp_path / "plant/nodes/node-0", patience=SOON)


def test_a_column_of_targets_is_not_taken_for_numbers(tmp_path: Path) -> None:
    """The loss of outputs [n] against targets [n, 1] would be that of every pair."""
    provisioning.create(
        validate({"clients": 3, "topology": {"kind": "ring"}}),
        tmp_path / "plant",
        example=((3,), 0),
    )
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    with pytest.raises(
        ConfigError, match=r"has shape \(2,\); expected \(2, 1\), the shape of the targets"
    ):
        start.run(
            tmp_path / "plant/nodes/node-0",
            data=data_file(tmp_path, x=x, y=x[:, :1]),
            patience=SOON,
        )


def test_data_of_fewer_classes_than_the_network_are_welcome(plant: Path, tmp_path: Path) -> None:
    start.run(
        plant / "nodes/a", data=data_file(tmp_path, x=PIXELS, y=np.arange(20) % 3), patience=SOON
    )
    assert RunFolder(plant / "nodes/a/state").read("result.json")["round"] == 3


def test_the_rounds_of_another_node_or_network(plant: Path, tmp_path: Path) -> None:
    journal_of(plant / "nodes/b", "b").close()
    with pytest.raises(
        StorageError,
        match=r"belongs to another node \(b, not a\): give this node a folder of its own with --state",
    ):
        start.run(plant / "nodes/a", state=plant / "nodes/b/state")
    provisioning.create(validate(Manifest.load(plant / "network.json").config), tmp_path / "other")
    with pytest.raises(StorageError, match="belongs to another network"):
        start.run(tmp_path / "other/nodes/node-1", state=plant / "nodes/b/state")


def test_a_state_folder_with_something_else_in_it(plant: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(
        StorageError,
        match="holds something else than the rounds of a node: give another folder with --state",
    ):
        start.run(plant / "nodes/a", state=tmp_path / "photos")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_rounds_that_were_copied_back_without_hidden_files_go_on(plant: Path) -> None:
    start.run(plant / "nodes/a", patience=SOON)
    (plant / "nodes/a/state/.lock").unlink()
    start.run(plant / "nodes/a", patience=SOON)
    assert RunFolder(plant / "nodes/a/state").read("result.json")["round"] == 3


def test_a_second_process_on_the_same_rounds(plant: Path) -> None:
    held = journal_of(plant / "nodes/a", "a")
    try:
        with pytest.raises(
            StorageError, match="is in use by another process: wait for it, or stop it"
        ):
            start.run(plant / "nodes/a")
    finally:
        held.close()


def test_a_port_that_is_taken(plant: Path) -> None:
    address = Manifest.load(plant / "network.json").member("a").address
    with (
        taken(address),
        pytest.raises(NodeError, match=f"address = '{address}': cannot listen there"),
    ):
        start.run(plant / "nodes/a")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(NodeError, match=f"--status-port {port} cannot be used"):
            start.run(plant / "nodes/a", status_port=port)


def test_an_address_to_listen_on_that_is_none(plant: Path) -> None:
    with pytest.raises(
        ConfigError, match="address = 'everywhere': not an address; expected host:port"
    ):
        start.run(plant / "nodes/a", listen="everywhere")


def test_plaintext_only_where_the_network_was_created_for_it(plant: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--insecure-plaintext: this network was created with TLS"
    ):
        start.run(plant / "nodes/a", insecure_plaintext=True)
    provisioning.create(
        validate(Manifest.load(plant / "network.json").config),
        tmp_path / "open",
        secure=False,
        port=1,
    )
    with pytest.raises(
        ConfigError, match="created without TLS; expected the option --insecure-plaintext"
    ):
        start.run(tmp_path / "open/nodes/node-0")


def test_a_newcomer_brings_data_and_needs_neighbours(plant: Path, tmp_path: Path) -> None:
    provisioning.add(plant, "new", ["a", "b"])
    with pytest.raises(DataError, match="brings its own examples: give them with --data"):
        start.run(plant / "nodes/new")
    with pytest.raises(NodeError, match="No neighbour gave its models to this newcomer"):
        start.run(
            plant / "nodes/new",
            data=data_file(tmp_path, x=PIXELS, y=np.arange(20) % 10),
            joining=True,
            patience=SOON,
        )
    with pytest.raises(
        ConfigError, match="'a' belongs to the network from its beginning and need not join"
    ):
        start.run(plant / "nodes/a", joining=True)


def test_the_file_of_a_graph_stays_with_the_operator(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n")
    tree = {
        "clients": 2,
        "rounds": 1,
        "topology": {"kind": "file", "file": str(tmp_path / "edges.txt")},
        "model": {"name": "linear"},
    }
    provisioning.create(validate(tree), tmp_path / "plant")
    (tmp_path / "edges.txt").unlink()
    start.run(
        tmp_path / "plant/nodes/node-1",
        data=data_file(tmp_path, x=PIXELS, y=np.arange(20) % 10),
        patience=SOON,
    )
    assert RunFolder(tmp_path / "plant/nodes/node-1/state").read("result.json")["round"] == 1


def test_a_revoked_neighbour_is_not_waited_for(plant: Path, tmp_path: Path) -> None:
    for name in ("b", "d"):
        provisioning.revoke(plant, name)
    before = time.monotonic()
    start.run(
        plant / "nodes/a",
        data=data_file(tmp_path, x=PIXELS, y=np.arange(20) % 10),
        patience=Timeouts(start=250),
    )
    assert time.monotonic() - before < 200
    assert [event.get("missing", []) for event in RunFolder(plant / "nodes/a/state").events()] == [
        [],
        [],
        [],
        [],
    ]


def test_what_the_disk_refuses_says_how_a_node_goes_on(plant: Path) -> None:
    journal = journal_of(plant / "nodes/a", "a")
    (plant / "nodes/a/state/events.jsonl").mkdir()
    try:
        with pytest.raises(
            StorageError,
            match=r"could not be written \(.*\): put that right, then start the node again",
        ):
            journal.record.append({"round": 1})
    finally:
        journal.close()
