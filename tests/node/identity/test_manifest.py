"""Manifests: as a file, as the agreement's hash, and with every error that is rejected."""

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspd.core.errors import ConfigError
from fedspd.node.identity.manifest import FORMAT, Manifest, Member, check_address, check_name

A = Member("a", 0, "10.0.0.1:7700", ("b",), 11)
B = Member("b", 1, "[fe80::2]:7700", ("a",), 12)
CONFIG = {"rounds": 3, "clusters": 2, "device": "cpu", "data": {"name": "digits", "mixture": "iid"}}
PAIR = Manifest(
    "0123456789abcdef" * 2, True, CONFIG, (1, 8, 8), 10, 650, 2, 700, 1, "float32", (A, B)
)


def test_manifest_survives_saving(tmp_path):
    PAIR.save(tmp_path / "manifest.json")
    assert Manifest.load(tmp_path / "manifest.json") == PAIR
    assert PAIR.member("b") == B


def test_manifest_suggests_the_nearest_name_for_an_unknown_member():
    manifest = replace(PAIR, members=(replace(A, name="node-1"), replace(B, name="x")))
    sentence = r"node = 'node-11': not in this network; did you mean 'node-1'\?"
    with pytest.raises(ConfigError, match=sentence):
        manifest.member("node-11")


@pytest.mark.parametrize(
    "change",
    [
        {"network": "f" * 32},
        {"config": CONFIG | {"rounds": 4}},
        {"config": CONFIG | {"data": {"name": "digits", "mixture": "rotation"}}},
        {"shape": (1, 8, 9)},
        {"classes": 11},
        {"size": 651},
        {"offer_limit": 3},
        {"size_limit": 701},
        {"diameter": 2},
        {"dtype": "float64"},
    ],
)
def test_agreement_covers_everything_that_peers_share(change):
    assert replace(PAIR, **change).agreement != PAIR.agreement


@pytest.mark.parametrize(
    "change",
    [
        {"members": ()},
        {"config": CONFIG | {"device": "cuda"}},
        {
            "config": CONFIG
            | {"data": {"name": "/home/a/a.npz", "second": "b.npz", "mixture": "iid"}}
        },
        {"config": dict(reversed(CONFIG.items()))},
    ],
)
def test_agreement_ignores_members_data_paths_and_devices(change):
    assert replace(PAIR, **change).agreement == PAIR.agreement


def test_agreement_is_the_sha256_of_canonical_json(tmp_path):
    text = (
        '{"classes":10,"config":{"clusters":2,"data":{"mixture":"iid"},"rounds":3},'
        '"diameter":1,"dtype":"float32","network":"0123456789abcdef0123456789abcdef",'
        '"offer_limit":2,"shape":[1,8,8],"size":650,"size_limit":700}'
    )
    assert PAIR.agreement == hashlib.sha256(text.encode()).hexdigest()
    PAIR.save(tmp_path / "m")
    assert Manifest.load(tmp_path / "m").agreement == PAIR.agreement


LOAD = """
import pathlib, sys
from fedspd.node.identity.manifest import Manifest
Manifest.load(pathlib.Path(sys.argv[1]))
print("torch" in sys.modules)
"""


def test_manifest_loads_without_torch(tmp_path):
    PAIR.save(tmp_path / "m")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def without(key):
    def change(tree):
        del tree[key]

    return change


def put(value, *keys):
    def change(tree):
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    return change


WRONG = {
    "missing": (without("size"), "size: missing key"),
    "missing in a member": (
        lambda tree: tree["members"][1].pop("client"),
        "members.1.client: missing key",
    ),
    "unknown": (put(1, "sise"), "sise: unknown key"),
    "unknown in a member": (put(1, "members", 0, "nam"), "members.0.nam: unknown key"),
    "text for a number": (put("650", "size"), 'size = "650": invalid value; expected a valid int'),
    "true for a number": (put(True, "classes"), "classes = true: invalid value; expected a valid"),
    "fraction": (put(1.5, "members", 0, "client"), "members.0.client = 1.5: invalid value; exp"),
    "number for true": (put(1, "secure"), "secure = 1: invalid value; expected a valid boolean"),
    "list for a table": (put([], "config"), "config = []: invalid value; expected"),
    "empty config": (put({}, "config"), "config.data = null: invalid value; expected a table"),
    "no offer": (put(0, "offer_limit"), "offer_limit = 0: too small; expected at least 1"),
    "negative diameter": (put(-1, "diameter"), "diameter = -1: too small; expected at least 0"),
    "list for data": (put([], "config", "data"), "config.data = []: invalid value; expected a tab"),
    "dtype": (
        put("float16", "dtype"),
        "dtype = \"float16\": invalid value; expected 'float32' or 'float64'",
    ),
    "network": (put("../etc", "network"), "network = '../etc': invalid value; expected 32 hexadec"),
    "shape": (put([1, 0], "shape"), "shape = [1, 0]: invalid value; expected"),
    "no shape": (put([], "shape"), "shape = []: invalid value; expected"),
    "size": (put(0, "size"), "size = 0: too small; expected at least 1"),
    "classes": (put(-1, "classes"), "classes = -1: too small; expected at least 0"),
    "name": (put("../a", "members", 0, "name"), "name = '../a': not a node name; expected"),
    "address": (
        put("10.0.0.1", "members", 0, "address"),
        "address = '10.0.0.1': not an address; expected host:port",
    ),
    "repeated name": (put("a", "members", 1, "name"), 'members.name = "a": used by 2 nodes'),
    "repeated client": (put(0, "members", 1, "client"), "members.client = 0: used by 2 nodes"),
    "negative client": (put(-1, "members", 1, "client"), "members.b.client = -1: too small"),
    "serial 0": (put(0, "members", 1, "serial"), "members.b.serial = 0: too small; expected at l"),
    "its own neighbour": (
        put(["b", "a"], "members", 0, "neighbours"),
        'members.a.neighbours = ["b", "a"]: the node is its own neighbour',
    ),
    "one-sided": (
        put([], "members", 0, "neighbours"),
        "members.b.neighbours = [\"a\"]: 'a' lacks 'b'",
    ),
    "unknown neighbour": (
        put(["b", "c"], "members", 0, "neighbours"),
        'members.a.neighbours = ["b", "c"]: \'c\' is not a member; expected one of',
    ),
    "repeated neighbour": (
        put(["b", "b"], "members", 0, "neighbours"),
        'members.a.neighbours = ["b", "b"]: a name is repeated',
    ),
}


def error_of(path, change):
    """Return the sentence that rejects a changed manifest, after the file's name."""
    PAIR.save(path)
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError) as rejected:
        Manifest.load(path)
    file, sentence = str(rejected.value).split(": ", 1)
    assert file == f"'{path}'"
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(("change", "sentence"), WRONG.values(), ids=WRONG)
def test_manifest_rejects_each_error_with_the_file_and_the_key(tmp_path, change, sentence):
    assert sentence in error_of(tmp_path / "manifest.json", change)


FIX = (
    "Install the version of fedspd that created this network, or create the network again with "
    "'fedspd network create'."
)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (put(FORMAT - 1, "format"), "format = 3: written by an older version of fedspd"),
        (put(FORMAT + 1, "format"), "format = 5: written by a newer version of fedspd"),
        (without("format"), "format = null: written by an older version of fedspd"),
    ],
    ids=["older", "newer", "none"],
)
def test_manifest_rejects_another_format_and_says_what_to_do(tmp_path, change, sentence):
    found = error_of(tmp_path / "manifest.json", change)
    assert found == f"{sentence}; expected 4. {FIX}"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": 3, "size": NaN}', "\x00", "[" * 100_000]
)
def test_manifest_rejects_other_files(tmp_path, text):
    (tmp_path / "m").write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path / "m")):
        Manifest.load(tmp_path / "m")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
def test_manifest_rejects_a_number_that_json_does_not_have(tmp_path, number):
    """Python reads it, but nobody could have signed it."""
    text = json.dumps({"format": FORMAT, **asdict(PAIR)}).replace(
        '"rounds": ', f'"x": {number}, "rounds": '
    )
    assert number in text
    (tmp_path / "m").write_text(text)
    with pytest.raises(ConfigError, match=r"damaged .*expected JSON"):
        Manifest.load(tmp_path / "m")


def test_manifest_rejects_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="none': cannot be read"):
        Manifest.load(tmp_path / "none")


LEAVES = st.none() | st.booleans() | st.integers() | st.text()


@settings(max_examples=30)
@given(tree=st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_manifest_accepts_or_rejects_any_value_at_any_key(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("any") / "m"
    for key in ("network", "config", "shape", "members", "size"):
        path.write_text(json.dumps({"format": FORMAT, **asdict(PAIR), key: tree}))
        try:
            loaded = Manifest.load(path)
        except ConfigError:
            continue
        assert loaded == replace(PAIR, **{key: getattr(loaded, key)})


@pytest.mark.parametrize("name", ["a", "node-0", "0", "a" * 32, "a--b"])
def test_check_name_accepts_node_names(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "A", "a" * 33, "-a", "a-", "a.b", "a b", "a/b", "ä", "a\n"])
def test_check_name_rejects_other_text(name):
    with pytest.raises(ConfigError, match="not a node name; expected"):
        check_name(name)


@pytest.mark.parametrize(
    "address",
    ["10.0.0.7:1", "[::1]:7700", "[fe80::1%eth0]:7700", "oven-2.plant.example:65535", "a.b.:1"],
)
def test_check_address_accepts_host_and_port(address):
    assert check_address(address) == address


OTHER_TEXT = ["", ":7700", "a", "a:", "a:0", "a:65536", "a:7700 ", "::1:7700", "a b:1", "a:1\n"]
NO_DNS_NAMES = ["a..b:1", ".a:1", f"{64 * 'a'}:1"]


@pytest.mark.parametrize("address", [*OTHER_TEXT, *NO_DNS_NAMES, "a:١", "a&b=c:1"])
def test_check_address_rejects_other_text(address):
    with pytest.raises(ConfigError, match="not an address; expected host:port"):
        check_address(address)
