"""The creation of a network's folder, and the reasons to refuse one."""

import os
import threading
from pathlib import Path

import pytest

from fedspd import config
from fedspd.core.errors import ConfigError, DataError, FedspdError, RejectedError, StorageError
from fedspd.experiment.build import build_experiment
from fedspd.node.host import provisioning
from fedspd.node.host.addresses import read_addresses
from fedspd.node.identity.certificates import parse_identity
from fedspd.node.identity.credentials import Credentials
from fedspd.node.identity.manifest import Manifest

TINY = {"clients": 3, "topology": {"kind": "ring"}, "model": {"name": "linear"}}
MNIST = ((1, 28, 28), 10)


def create(out: Path, settings=None, **options) -> Manifest:
    return provisioning.create(config.validate(TINY | (settings or {})), out, **options)


def certificate_of(bundle: Path) -> bytes:
    return (bundle / "node.crt").read_bytes()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_below(folder)}


# ---- create


def test_create_writes_all_files_and_keeps_keys_private(plant):
    files = {"ca.key", "ca.crt", "network.json", "revoked.crl", "nodes"}
    assert {path.name for path in plant.iterdir()} == files
    assert {path.name for path in (plant / "nodes").iterdir()} == set("abcd")
    for bundle in (plant / "nodes").iterdir():
        files = {"manifest.json", "node.key", "node.crt", "ca.crt", "revoked.crl"}
        assert {path.name for path in bundle.iterdir()} == files
        assert (mode(bundle), mode(bundle / "node.key")) == (0o700, 0o600)
        assert Manifest.load(bundle / "manifest.json") == Manifest.load(plant / "network.json")
    assert mode(plant / "ca.key") == 0o600


def test_create_links_the_neighbours_of_the_simulated_network(tmp_path):
    settings = {
        "clients": 8,
        "seed": 5,
        "topology": {"kind": "er", "degree": 3},
        "data": {"examples": 20},
    }
    manifest = create(tmp_path / "plant", settings)
    graph = build_experiment(config.validate(TINY | settings)).topology.at(1)
    for member in manifest.members:
        assert member.neighbours == tuple(f"node-{j}" for j in graph.neighbours(member.client))


def test_manifest_describes_the_config_and_its_data(plant):
    manifest = Manifest.load(plant / "network.json")
    assert (manifest.shape, manifest.classes, manifest.dtype) == ((1, 8, 8), 10, "float32")
    assert manifest.secure
    assert manifest.size == 64 * 16 + 16 + 16 * 10 + 10
    assert config.as_dict(config.validate(manifest.config)) == manifest.config
    assert [(m.name, m.client, m.neighbours) for m in manifest.members] == [
        ("a", 0, ("b", "d")),
        ("b", 1, ("a", "c")),
        ("c", 2, ("b", "d")),
        ("d", 3, ("a", "c")),
    ]


def test_certificates_agree_with_the_manifest(plant):
    manifest = Manifest.load(plant / "network.json")
    for member in manifest.members:
        identity = parse_identity(Credentials.load(plant / "nodes" / member.name).certificate)
        assert identity.network == manifest.network
        for field in ("name", "client", "address", "neighbours", "serial"):
            assert getattr(identity, field) == getattr(member, field)


def test_verifier_accepts_only_the_neighbours_on_the_ring(plant, verifier_of):
    bundles = {name: plant / "nodes" / name for name in "abcd"}
    assert verifier_of(bundles["a"]).verify(certificate_of(bundles["b"])).client == 1
    with pytest.raises(RejectedError, match="not a neighbour: 'c' and 'a' have no link"):
        verifier_of(bundles["a"]).verify(certificate_of(bundles["c"]))


def test_create_takes_names_and_addresses_or_their_defaults(tmp_path):
    usual = create(tmp_path / "usual")
    assert [(m.name, m.address) for m in usual.members] == [
        (f"node-{i}", f"127.0.0.1:{7700 + i}") for i in range(3)
    ]
    named = create(tmp_path / "named", names=["x", "y", "z"], host="::1", port=9000)
    assert [(m.name, m.address) for m in named.members] == [
        ("x", "[::1]:9000"),
        ("y", "[::1]:9001"),
        ("z", "[::1]:9002"),
    ]
    addresses = {"gate": "10.0.0.1:1", "pump": "10.0.0.2:1", "oven": "oven.plant.example:1"}
    placed = create(tmp_path / "placed", addresses=addresses)
    assert [m.name for m in placed.members] == ["gate", "pump", "oven"]
    ordered = create(tmp_path / "ordered", addresses=addresses, names=["oven", "gate", "pump"])
    assert (ordered.members[0].name, ordered.members[0].address) == ("oven", "oven.plant.example:1")


def test_create_takes_shape_and_classes_instead_of_data(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSPD_DATA", str(tmp_path / "none"))
    settings = {"data": {"name": "mnist"}, "device": "cuda"}
    manifest = create(tmp_path / "plant", settings, example=MNIST)
    assert (manifest.shape, manifest.classes, manifest.size) == ((1, 28, 28), 10, 7850)
    assert manifest.config["device"] == "cuda"
    with pytest.raises(DataError, match="mnist"):
        create(tmp_path / "other", settings)
    assert not (tmp_path / "other").exists()


def test_manifest_of_a_regression_has_no_classes(tmp_path):
    manifest = create(tmp_path / "plant", {"data": {"mixture": "iid"}}, example=((3,), 0))
    assert (manifest.shape, manifest.classes, manifest.size) == ((3,), 0, 4)


def test_networks_of_one_config_reject_one_another(tmp_path, verifier_of):
    one, two = create(tmp_path / "one"), create(tmp_path / "two")
    assert one.network != two.network
    assert one.agreement != two.agreement
    with pytest.raises(RejectedError, match="foreign CA"):
        verifier_of(tmp_path / "one/nodes/node-0").verify(
            certificate_of(tmp_path / "two/nodes/node-1")
        )


def test_manifest_says_whether_a_network_is_plaintext(tmp_path):
    assert create(tmp_path / "plant", secure=False).secure is False
    assert Manifest.load(tmp_path / "plant/nodes/node-0/manifest.json").secure is False


REFUSED = {
    "star": (
        {"topology": {"kind": "star"}},
        {},
        "topology.kind = 'star': peers have no server; expected another kind. Use 'complete'",
    ),
    "dynamic": (
        {"topology": {"kind": "ring", "remove": 0.1}},
        {},
        "topology.remove = 0.1: peers keep their neighbours",
    ),
    "holdout": (
        {"holdout_clients": 2},
        {},
        "holdout_clients = 2: peers join while the network runs",
    ),
    "bad name": ({}, {"names": ["a", "b", "C"]}, "name = 'C': not a node name"),
    "two of a name": ({}, {"names": ["a", "b", "a"]}, "node = 'a': the name is given twice"),
    "too few names": ({}, {"names": ["a", "b"]}, "clients = 3: there are 2 node names"),
    "too few addresses": (
        {},
        {"addresses": {"a": "h:1"}},
        "clients = 3: there are 1 node names",
    ),
    "other addresses": (
        {},
        {"names": list("abc"), "addresses": {"a": "h:1", "b": "h:2", "d": "h:3"}},
        "node = 'c': only among the names or the addresses",
    ),
    "bad address": (
        {},
        {"addresses": {"a": "h:1", "b": "h:2", "c": "h"}},
        "address = 'h': not an address",
    ),
    "two of an address": (
        {},
        {"addresses": {"a": "h:1", "b": "h:1", "c": "h:2"}},
        'members.address = "h:1": used by 2 nodes',
    ),
    "ports run out": ({}, {"port": 65534}, "address = '127.0.0.1:65536': not an address"),
    "bad host": ({}, {"host": "a b"}, "address = 'a b:7700': not an address"),
    "days": ({}, {"days": 0}, "days = 0: not a possible lifetime"),
    "no such model": ({"model": {"name": "lniear"}}, {}, "did you mean 'linear'?"),
    "model does not fit": ({"model": {"name": "cnn"}}, {"example": ((3,), 2)}, "shape (3,)"),
    "bad shape": ({}, {"example": ((0,), 2)}, "has shape (0,)"),
    "impossible graph": (
        {"topology": {"kind": "er", "degree": 9}},
        {},
        "topology.degree = 9: too large",
    ),
}


@pytest.mark.parametrize(("settings", "options", "sentence"), REFUSED.values(), ids=REFUSED)
def test_create_refuses_an_impossible_network_and_leaves_nothing(
    tmp_path, settings, options, sentence
):
    with pytest.raises(FedspdError) as refused:
        create(tmp_path / "plant", settings, **options)
    assert sentence in str(refused.value)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "plant").exists()


def test_create_never_overwrites_a_network(plant):
    before = read_files(plant)
    with pytest.raises(StorageError, match=r"is not an empty folder; .* Give another --out"):
        create(plant)
    assert read_files(plant) == before


def test_create_takes_an_empty_folder_but_not_a_file(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    create(Path("."))
    assert (tmp_path / "empty" / "network.json").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="exists and is not an empty folder"):
        create(tmp_path / "file")


def test_create_succeeds_once_if_called_concurrently(tmp_path):
    ends: list[object] = []

    def make() -> None:
        try:
            ends.append(create(tmp_path / "plant").network)
        except StorageError as error:
            ends.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    network = Manifest.load(tmp_path / "plant/network.json").network
    assert [end for end in ends if isinstance(end, str)] == [network]
    assert parse_identity(certificate_of(tmp_path / "plant/nodes/node-0")).network == network


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_create_reports_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="could not be written"):
        create(tmp_path / "plant")


def test_create_reports_a_folder_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"could not be written \(.*Not a directory"):
        create(tmp_path / "file" / "plant")


def test_read_addresses_takes_toml_and_refuses_anything_else(tmp_path):
    file = tmp_path / "addresses.toml"
    file.write_text('a = "10.0.0.1:7700"\nb-2 = "[::1]:1"\n')
    assert read_addresses(file) == {"a": "10.0.0.1:7700", "b-2": "[::1]:1"}
    file.write_text("a = 7700\n")
    with pytest.raises(ConfigError, match=r"addresses\.toml: a = 7700: expected a text"):
        read_addresses(file)
    for damage in ("a = ", None):
        file.write_text(damage) if damage else file.unlink()
        with pytest.raises(ConfigError, match=r"--addresses .*: cannot be read"):
            read_addresses(file)


def test_private_keys_are_only_in_key_files(plant):
    with_keys = {path.name for path in files_below(plant) if "PRIVATE" in path.read_text()}
    assert with_keys == {"ca.key", "node.key"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data": {"examples": 100_000}}, "data.examples = 100000: all clients together need"),
        ({"clusters": 50, "data": {"examples": 20}}, "clusters = 50: a client has only 20"),
        ({"data": {"mixture": "colour"}}, "data.mixture = 'colour': an example of"),
    ],
)
def test_create_refuses_what_every_node_would_refuse(tmp_path, settings, sentence):
    tree = {"clients": 4, "method": "fedspd", "topology": {"kind": "ring"}, **settings}
    tree["data"] = {"name": "digits", **settings["data"]}
    with pytest.raises(FedspdError, match=sentence):
        provisioning.create(config.validate({**tree, "model": {"name": "mlp"}}), tmp_path / "plant")
    assert not (tmp_path / "plant").exists()


def test_create_refuses_a_model_of_the_current_folder(tmp_path, monkeypatch):
    """No device has this folder; the nodes would refuse it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pwn.py").write_text("raise SystemExit('imported')\n")
    with pytest.raises(ConfigError, match=r"model.name = 'pwn:make': the module is not installed"):
        create(tmp_path / "plant", {"model": {"name": "pwn:make"}}, example=MNIST)
