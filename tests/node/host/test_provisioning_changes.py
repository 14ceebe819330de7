"""A network that changes: nodes come and go, and an operator looks."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from fedspd import config
from fedspd.cli.main import guarded
from fedspd.core.errors import ConfigError, RejectedError, StorageError
from fedspd.node.host import provisioning
from fedspd.node.identity.certificates import parse_identity
from fedspd.node.identity.credentials import Credentials
from fedspd.node.identity.manifest import Manifest


def own(bundle: Path) -> bytes:
    return (bundle / "node.crt").read_bytes()


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# ---- add


def test_a_newcomer_and_running_devices_know_one_another_without_any_news(
    plant, tmp_path, verifier_of
):
    running = shutil.copytree(plant / "nodes/a", tmp_path / "device")
    added = provisioning.add(plant, "new", ["a", "c"], "10.0.0.9:7700")
    assert (added.client, added.address, added.neighbours) == (4, "10.0.0.9:7700", ("a", "c"))
    assert verifier_of(running).verify(own(plant / "nodes/new")).address == "10.0.0.9:7700"
    assert verifier_of(plant / "nodes/new").verify(own(running)).name == "a"
    with pytest.raises(RejectedError, match="not a neighbour"):
        verifier_of(plant / "nodes/b").verify(own(plant / "nodes/new"))
    assert Credentials.load(plant / "nodes/new").ca == Credentials.load(running).ca


def test_all_bundles_that_are_here_learn_of_a_newcomer_and_agree_as_before(plant):
    before = Manifest.load(plant / "network.json")
    shutil.rmtree(plant / "nodes/b")  # moved to its device
    provisioning.add(plant, "new", ["a", "b"])
    after = Manifest.load(plant / "network.json")
    assert [Manifest.load(path) == after for path in plant.glob("nodes/*/manifest.json")] == [
        True
    ] * 4
    assert after.agreement == before.agreement
    assert after.member("b").neighbours == ("a", "c", "new")
    assert after.member("c") == before.member("c")


def test_addresses_of_newcomers_follow_the_last_one(tmp_path):
    provisioning.create(
        config.validate({"clients": 3, "topology": {"kind": "ring"}}), tmp_path / "plant", port=7000
    )
    assert [provisioning.add(tmp_path / "plant", name, ["node-0"]).address for name in "xy"] == [
        "127.0.0.1:7003",
        "127.0.0.1:7004",
    ]


NO_NEWCOMER = {
    "taken name": ("a", ["b"], None, "There is a node 'a' already"),
    "bad name": ("A", ["b"], None, "name = 'A': not a node name"),
    "no neighbours": ("x", [], None, "The node 'x' has no neighbours"),
    "unknown neighbour": ("x", ["e"], None, "node = 'e': not in this network"),
    "itself": ("x", ["x"], None, "node = 'x': not in this network"),
    "twice": ("x", ["a", "a"], None, "a name is repeated"),
    "revoked neighbour": ("x", ["a", "d"], None, "'d' cannot be a neighbour: it is revoked"),
    "bad address": ("x", ["a"], "here", "address = 'here': not an address"),
}


@pytest.mark.parametrize(
    ("name", "neighbours", "address", "sentence"), NO_NEWCOMER.values(), ids=NO_NEWCOMER
)
def test_who_cannot_be_added_changes_nothing(plant, name, neighbours, address, sentence):
    provisioning.revoke(plant, "d")
    before = everything(plant)
    with pytest.raises(ConfigError) as refused:
        provisioning.add(plant, name, neighbours, address)
    assert sentence in str(refused.value)
    assert everything(plant) == before


def test_an_address_is_given_once(plant):
    with pytest.raises(ConfigError, match=r"members\.address = .*: used by 2 nodes"):
        provisioning.add(
            plant, "x", ["a"], Manifest.load(plant / "network.json").member("b").address
        )


def test_what_an_interrupted_add_left_is_replaced(plant):
    for leftover in ("nodes/x", "nodes/.x.draft"):
        (plant / leftover).mkdir()
        (plant / leftover / "node.key").write_text("half")
    provisioning.add(plant, "x", ["a"])
    assert parse_identity(Credentials.load(plant / "nodes/x").certificate).name == "x"
    assert not (plant / "nodes/.x.draft").exists()


def test_many_that_add_at_once_get_a_number_each(plant):
    threads = [
        threading.Thread(target=provisioning.add, args=(plant, f"new-{i}", ["a"], f"10.0.0.{i}:1"))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manifest = Manifest.load(plant / "network.json")
    assert [member.client for member in manifest.members] == list(range(12))
    assert Manifest.load(plant / "nodes/new-3/manifest.json") == manifest


# ---- revoke and show


def test_a_revoked_node_is_refused_by_all_bundles_and_stays_so(plant, verifier_of):
    verifiers = {name: verifier_of(plant / "nodes" / name) for name in "abcd"}
    b = own(plant / "nodes/b")
    assert verifiers["a"].verify(b).name == "b"
    assert provisioning.revoke(plant, "b").name == "b"
    for name in "ac":
        with pytest.raises(RejectedError, match="revoked: the certificate of 'b'"):
            verifiers[name].verify(b)
    provisioning.add(plant, "x", ["a"])
    provisioning.revoke(plant, "d")
    assert [
        verifier_of(plant / "nodes/x").is_revoked(
            Manifest.load(plant / "network.json").member(name).serial
        )
        for name in "abcd"
    ] == [
        False,
        True,
        False,
        True,
    ]


def test_to_revoke_again_writes_the_same_list_anew(plant, verifier_of):
    provisioning.revoke(plant, "b")
    (plant / "nodes/a/revoked.crl").unlink()
    provisioning.revoke(plant, "b")
    assert verifier_of(plant / "nodes/a").is_revoked(
        Manifest.load(plant / "network.json").member("b").serial
    )
    assert sum(node["revoked"] for node in provisioning.show(plant)["nodes"]) == 1


def test_who_is_not_there_cannot_be_revoked(plant):
    with pytest.raises(
        ConfigError, match="node = 'e': not in this network; expected one of: a, b, c, d"
    ):
        provisioning.revoke(plant, "e")


def test_what_is_shown(plant):
    provisioning.revoke(plant, "b")
    shutil.rmtree(plant / "nodes/c")
    (plant / "ca.key").unlink()  # who only looks needs no key
    shown = provisioning.show(plant)
    manifest = Manifest.load(plant / "network.json")
    assert (shown["network"], shown["agreement"], shown["secure"]) == (
        manifest.network,
        manifest.agreement,
        True,
    )
    a, b, c, _ = shown["nodes"]
    assert (a["name"], a["client"], a["address"], a["neighbours"]) == (
        "a",
        0,
        manifest.member("a").address,
        ["b", "d"],
    )
    assert (a["until"], a["revoked"]) == (
        parse_identity(own(plant / "nodes/a")).valid_until.isoformat(),
        False,
    )
    assert int(a["serial"], 16) == manifest.member("a").serial
    assert b["revoked"]
    assert c["until"] is None


def test_a_certificate_that_is_no_node_s_is_named(plant):
    for wrong in ((plant / "ca.crt").read_text(), "rubbish"):
        (plant / "nodes/b/node.crt").write_text(wrong)
        with pytest.raises(StorageError, match=r"nodes/b/node\.crt': "):
            provisioning.show(plant)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_bundle_that_this_user_may_not_read_is_not_here(plant):
    (plant / "nodes/b").chmod(0)
    (plant / "nodes/c/node.crt").chmod(0)
    assert [
        node["name"] for node in provisioning.show(plant)["nodes"] if node["until"] is None
    ] == ["b", "c"]
    plant.chmod(0)
    with pytest.raises(
        StorageError,
        match=r"network\.json': cannot be read \(Permission denied\)\. Run the command as the user",
    ):
        provisioning.show(plant)


def test_a_file_in_the_place_of_a_bundle_is_no_bundle(plant):
    shutil.rmtree(plant / "nodes/b")
    (plant / "nodes/b").touch()
    assert [
        node["name"] for node in provisioning.show(plant)["nodes"] if node["until"] is None
    ] == ["b"]


def test_an_address_in_brackets_is_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    provisioning.create(
        config.validate({"clients": 1}), tmp_path / "plant", host="fe80::2", port=7700
    )
    assert guarded(["network", "show", "--network", str(tmp_path / "plant")]) == 0
    assert "[fe80::2]:7700" in capsys.readouterr().out


@pytest.mark.parametrize(
    "act",
    [
        provisioning.show,
        lambda folder: provisioning.add(folder, "x", ["a"]),
        lambda folder: provisioning.revoke(folder, "a"),
    ],
)
def test_what_is_no_network_is_refused(tmp_path, act):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(
            StorageError,
            match=r"not a network; expected a folder with network\.json\. Create one with",
        ):
            act(folder)


def test_a_folder_of_two_networks_is_refused(plant, tmp_path):
    provisioning.create(config.validate({"clients": 1}), tmp_path / "other")
    shutil.copy(tmp_path / "other/network.json", plant / "network.json")
    with pytest.raises(
        StorageError, match=r"network\.json' and ca\.crt beside it belong to two networks"
    ):
        provisioning.revoke(plant, "node-0")


def test_a_missing_or_open_authority_key_is_refused(plant):
    (plant / "ca.key").chmod(0o644)
    with pytest.raises(StorageError, match=r"ca\.key': mode = 0644"):
        provisioning.revoke(plant, "a")
    (plant / "ca.key").unlink()
    with pytest.raises(StorageError, match=r"ca\.key': cannot be read"):
        provisioning.revoke(plant, "a")
