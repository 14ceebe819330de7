"""Changes of a network: nodes are added and revoked, and an operator looks."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from fedspd import config
from fedspd.cli.main import execute
from fedspd.core.errors import ConfigError, RejectedError, StorageError
from fedspd.node.host import provisioning
from fedspd.node.identity.certificates import parse_identity
from fedspd.node.identity.credentials import CertificateVerifier, Credentials
from fedspd.node.identity.manifest import Manifest


def certificate_of(bundle: Path) -> bytes:
    return (bundle / "node.crt").read_bytes()


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def revoked_for(verifier: CertificateVerifier, network: Path) -> set[str]:
    """Return the members that a verifier takes for revoked."""
    members = Manifest.load(network / "network.json").members
    return {member.name for member in members if verifier.is_revoked(member.serial)}


def unread_bundles(network: Path) -> list[str]:
    """Return the nodes of which `show` could not read the certificate."""
    return [node["name"] for node in provisioning.show(network)["nodes"] if node["until"] is None]


# ---- add


def test_newcomer_and_running_nodes_accept_one_another_without_an_update(
    plant, tmp_path, verifier_of
):
    running = shutil.copytree(plant / "nodes/a", tmp_path / "device")
    added = provisioning.add(plant, "new", ["a", "c"], "10.0.0.9:7700")
    assert (added.client, added.address, added.neighbours) == (4, "10.0.0.9:7700", ("a", "c"))
    newcomer = verifier_of(running).verify(certificate_of(plant / "nodes/new"))
    assert newcomer.address == "10.0.0.9:7700"
    assert verifier_of(plant / "nodes/new").verify(certificate_of(running)).name == "a"
    with pytest.raises(RejectedError, match="not a neighbour"):
        verifier_of(plant / "nodes/b").verify(certificate_of(plant / "nodes/new"))
    assert Credentials.load(plant / "nodes/new").ca == Credentials.load(running).ca


def test_add_updates_the_bundles_and_keeps_the_agreement(plant):
    before = Manifest.load(plant / "network.json")
    shutil.rmtree(plant / "nodes/b")  # moved to its device
    provisioning.add(plant, "new", ["a", "b"])
    after = Manifest.load(plant / "network.json")
    manifests = [Manifest.load(path) for path in plant.glob("nodes/*/manifest.json")]
    assert manifests == [after] * 4
    assert after.agreement == before.agreement
    assert after.member("b").neighbours == ("a", "c", "new")
    assert after.member("c") == before.member("c")


def test_add_gives_a_newcomer_the_next_address(tmp_path):
    ring = config.validate({"clients": 3, "topology": {"kind": "ring"}})
    provisioning.create(ring, tmp_path / "plant", port=7000)
    added = [provisioning.add(tmp_path / "plant", name, ["node-0"]) for name in "xy"]
    assert [member.address for member in added] == ["127.0.0.1:7003", "127.0.0.1:7004"]


NO_NEWCOMER = {
    "taken name": ("a", ["b"], None, "node = 'a': exists already"),
    "bad name": ("A", ["b"], None, "name = 'A': not a node name"),
    "no neighbours": ("x", [], None, "node = 'x': no neighbours are given"),
    "unknown neighbour": ("x", ["e"], None, "node = 'e': not in this network"),
    "itself": ("x", ["x"], None, "node = 'x': not in this network"),
    "twice": ("x", ["a", "a"], None, "a name is repeated"),
    "revoked neighbour": ("x", ["a", "d"], None, "'d' cannot be a neighbour: it is revoked"),
    "bad address": ("x", ["a"], "here", "address = 'here': not an address"),
}


@pytest.mark.parametrize(
    ("name", "neighbours", "address", "sentence"), NO_NEWCOMER.values(), ids=NO_NEWCOMER
)
def test_add_refuses_an_impossible_node_and_changes_nothing(
    plant, name, neighbours, address, sentence
):
    provisioning.revoke(plant, "d")
    before = read_files(plant)
    with pytest.raises(ConfigError) as refused:
        provisioning.add(plant, name, neighbours, address)
    assert sentence in str(refused.value)
    assert read_files(plant) == before


def test_add_refuses_an_address_in_use(plant):
    with pytest.raises(ConfigError, match=r"members\.address = .*: used by 2 nodes"):
        provisioning.add(
            plant, "x", ["a"], Manifest.load(plant / "network.json").member("b").address
        )


def test_add_replaces_the_remains_of_an_interrupted_one(plant):
    for leftover in ("nodes/x", "nodes/.x.draft"):
        (plant / leftover).mkdir()
        (plant / leftover / "node.key").write_text("half")
    provisioning.add(plant, "x", ["a"])
    assert parse_identity(Credentials.load(plant / "nodes/x").certificate).name == "x"
    assert not (plant / "nodes/.x.draft").exists()


def test_add_gives_every_node_its_own_number_if_called_concurrently(plant):
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


def test_revoked_node_is_rejected_by_all_bundles_from_then_on(plant, verifier_of):
    verifiers = {name: verifier_of(plant / "nodes" / name) for name in "abcd"}
    b = certificate_of(plant / "nodes/b")
    assert verifiers["a"].verify(b).name == "b"
    assert provisioning.revoke(plant, "b").name == "b"
    for name in "ac":
        with pytest.raises(RejectedError, match="revoked: the certificate of 'b'"):
            verifiers[name].verify(b)
    provisioning.add(plant, "x", ["a"])
    provisioning.revoke(plant, "d")
    assert revoked_for(verifier_of(plant / "nodes/x"), plant) == {"b", "d"}


def test_revoke_writes_the_same_list_again_for_a_revoked_node(plant, verifier_of):
    provisioning.revoke(plant, "b")
    (plant / "nodes/a/revoked.crl").unlink()
    provisioning.revoke(plant, "b")
    assert revoked_for(verifier_of(plant / "nodes/a"), plant) == {"b"}
    assert sum(node["revoked"] for node in provisioning.show(plant)["nodes"]) == 1


def test_revoke_refuses_an_unknown_node(plant):
    with pytest.raises(ConfigError, match="'e': not in this network; expected one of: a, b, c, d"):
        provisioning.revoke(plant, "e")


def test_show_describes_the_network_without_its_key(plant):
    provisioning.revoke(plant, "b")
    shutil.rmtree(plant / "nodes/c")
    (plant / "ca.key").unlink()  # only changes need it
    shown = provisioning.show(plant)
    manifest = Manifest.load(plant / "network.json")
    assert (shown["network"], shown["agreement"]) == (manifest.network, manifest.agreement)
    assert shown["secure"]
    a, b, c, _ = shown["nodes"]
    member, identity = manifest.member("a"), parse_identity(certificate_of(plant / "nodes/a"))
    assert a == {
        "name": "a",
        "client": 0,
        "address": member.address,
        "neighbours": ["b", "d"],
        "serial": f"{member.serial:x}",
        "until": identity.valid_until.isoformat(),
        "revoked": False,
    }
    assert b["revoked"]
    assert c["until"] is None


def test_show_names_a_certificate_that_is_not_of_a_node(plant):
    for wrong in ((plant / "ca.crt").read_text(), "damaged"):
        (plant / "nodes/b/node.crt").write_text(wrong)
        with pytest.raises(StorageError, match=r"nodes/b/node\.crt': "):
            provisioning.show(plant)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_show_passes_over_a_bundle_that_the_user_may_not_read(plant):
    (plant / "nodes/b").chmod(0)
    (plant / "nodes/c/node.crt").chmod(0)
    assert unread_bundles(plant) == ["b", "c"]
    plant.chmod(0)
    with pytest.raises(StorageError, match=r"network\.json': cannot be read \(Permission denied"):
        provisioning.show(plant)


def test_show_does_not_take_a_file_for_a_bundle(plant):
    shutil.rmtree(plant / "nodes/b")
    (plant / "nodes/b").touch()
    assert unread_bundles(plant) == ["b"]


def test_show_prints_an_address_in_brackets(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    one_node = config.validate({"clients": 1})
    provisioning.create(one_node, tmp_path / "plant", host="fe80::2", port=7700)
    assert execute(["network", "show", "--network", str(tmp_path / "plant")]) == 0
    assert "[fe80::2]:7700" in capsys.readouterr().out


@pytest.mark.parametrize(
    "act",
    [
        provisioning.show,
        lambda folder: provisioning.add(folder, "x", ["a"]),
        lambda folder: provisioning.revoke(folder, "a"),
    ],
)
def test_commands_refuse_a_folder_that_is_not_a_network(tmp_path, act):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(StorageError, match=r"not a network; .* Create one with"):
            act(folder)


def test_commands_refuse_a_folder_of_two_networks(plant, tmp_path):
    provisioning.create(config.validate({"clients": 1}), tmp_path / "other")
    shutil.copy(tmp_path / "other/network.json", plant / "network.json")
    with pytest.raises(StorageError, match=r"and ca\.crt beside it belong to two networks"):
        provisioning.revoke(plant, "node-0")


def test_commands_refuse_a_missing_or_readable_authority_key(plant):
    (plant / "ca.key").chmod(0o644)
    with pytest.raises(StorageError, match=r"ca\.key': mode = 0644"):
        provisioning.revoke(plant, "a")
    (plant / "ca.key").unlink()
    with pytest.raises(StorageError, match=r"ca\.key': cannot be read"):
        provisioning.revoke(plant, "a")
