"""A bundle is opened and checked once."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedspd.config import validate
from fedspd.core.errors import ConfigError, StorageError
from fedspd.node.host import provisioning
from fedspd.node.host.bundle import open_bundle
from fedspd.node.identity.credentials import Authority
from fedspd.node.identity.manifest import Manifest, Member


def test_bundle_knows_its_node_and_whether_it_is_a_newcomer(plant: Path) -> None:
    provisioning.add(plant, "new", ["a", "b"])
    founder, newcomer = open_bundle(plant / "nodes/a"), open_bundle(plant / "nodes/new")
    assert (founder.identity.name, founder.identity.client, founder.is_newcomer) == ("a", 0, False)
    assert (newcomer.identity.name, newcomer.identity.client) == ("new", 4)
    assert newcomer.is_newcomer
    assert founder.config.rounds == 3
    assert founder.journal_folder(None) == plant / "nodes/a/state"
    assert founder.journal_folder(plant) == plant


def test_plaintext_bundle_is_named_by_its_folder(tmp_path: Path) -> None:
    provisioning.create(
        validate({"clients": 3, "topology": {"kind": "ring"}}), tmp_path / "open", secure=False
    )
    assert open_bundle(tmp_path / "open/nodes/node-1").identity.client == 1


def test_bundle_needs_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"not a node bundle; expected a folder with manifest"):
        open_bundle(tmp_path)
    with pytest.raises(StorageError, match=r"manifest\.json': cannot be read \(File name too"):
        open_bundle(tmp_path / (300 * "a"))


@pytest.mark.parametrize("name", ["node.key", "node.crt", "ca.crt", "revoked.crl"])
def test_bundle_needs_all_its_files(plant: Path, name: str) -> None:
    (plant / "nodes/a" / name).unlink()
    with pytest.raises(
        StorageError, match=rf"{name} is missing; .* Copy the complete bundle again"
    ):
        open_bundle(plant / "nodes/a")


def test_bundle_refuses_a_certificate_that_is_not_of_a_node(plant: Path) -> None:
    bundle = plant / "nodes/a"
    shutil.copy(bundle / "ca.crt", bundle / "node.crt")
    with pytest.raises(StorageError, match=r"a/node\.crt': not the certificate of a node"):
        open_bundle(bundle)


def write_signed(network: Path, path: Path, tree: dict[str, Any]) -> None:
    """Write a manifest that the network's authority has signed, whatever it says."""
    members = tuple(
        Member(**{**each, "neighbours": tuple(each["neighbours"])}) for each in tree["members"]
    )
    fields = {key: value for key, value in tree.items() if key != "format"}
    fields |= {"members": members, "shape": tuple(tree["shape"])}
    path.write_text(Authority.load(network).sign(Manifest(**fields)).to_json())


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"model": {"name": "pwn:make", "hidden": 16}}},
        {"config": {"data": {"name": "pwn:make"}}},
        {"secure": False},
        {"size_limit": 10**9},
        {"signature": ""},
        {"signature": "no digits"},
    ],
)
def test_bundle_refuses_a_manifest_that_the_authority_did_not_sign(
    plant: Path, change: dict[str, Any]
) -> None:
    path = plant / "nodes/a/manifest.json"
    tree = json.loads(path.read_text())
    config = {**tree["config"], **change.pop("config", {})}
    path.write_text(json.dumps({**tree, **change, "config": config}))
    with pytest.raises(StorageError, match="changed after the network's authority signed it"):
        open_bundle(path.parent)


def test_bundle_may_choose_its_own_device(plant: Path) -> None:
    path = plant / "nodes/a/manifest.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, "config": {**tree["config"], "device": "cpu"}}))
    assert open_bundle(path.parent).config.device == "cpu"


def test_bundle_of_a_changed_network_is_signed_again(plant: Path) -> None:
    provisioning.add(plant, "new", ["a", "b"])
    for name in ("a", "new"):
        assert len(open_bundle(plant / "nodes" / name).manifest.members) == 5


def test_bundle_refuses_a_wrong_config(plant: Path) -> None:
    path = plant / "nodes/a/manifest.json"
    tree = json.loads(path.read_text())
    for wrong, sentence in (
        ({}, "config.data = null"),
        ({**tree["config"], "rounds": 0}, "config: rounds = 0"),
        ({**tree["config"], "roundz": 1}, "config: roundz: unknown key"),
    ):
        write_signed(plant, path, {**tree, "config": wrong})
        with pytest.raises(ConfigError) as refused:
            open_bundle(plant / "nodes/a")
        assert str(refused.value).startswith(f"'{path}': ")
        assert sentence in str(refused.value)


def test_bundle_refuses_files_of_two_networks(plant: Path, tmp_path: Path) -> None:
    config = open_bundle(plant / "nodes/a").config
    provisioning.create(config, tmp_path / "other", names=list("abcd"))
    shutil.copy(tmp_path / "other/nodes/a/manifest.json", plant / "nodes/a/manifest.json")
    with pytest.raises(StorageError, match=r"belong to two networks; .* Copy the complete bundle"):
        open_bundle(plant / "nodes/a")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_bundle_of_another_user_is_refused(plant: Path) -> None:
    (plant / "nodes/a").chmod(0)
    with pytest.raises(StorageError, match=r"manifest\.json': cannot be read \(Permission den"):
        open_bundle(plant / "nodes/a")
