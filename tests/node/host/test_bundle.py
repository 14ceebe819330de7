"""A bundle is opened and checked once."""

import json
import os
import shutil
from pathlib import Path

import pytest

from fedspd.config import validate
from fedspd.core.errors import ConfigError, StorageError
from fedspd.node.host import provisioning
from fedspd.node.host.bundle import open_bundle


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


def test_bundle_refuses_a_wrong_config(plant: Path) -> None:
    path = plant / "nodes/a/manifest.json"
    tree = json.loads(path.read_text())
    for wrong, sentence in (
        ({}, "config.data = null"),
        ({**tree["config"], "rounds": 0}, "config: rounds = 0"),
        ({**tree["config"], "roundz": 1}, "config: roundz: unknown key"),
    ):
        path.write_text(json.dumps({**tree, "config": wrong}))
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
