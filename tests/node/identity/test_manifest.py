"""What peers agree on: as a file, as a hash, and what is refused in it."""

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspd.core.errors import ConfigError
from fedspd.node.identity.manifest import Manifest, Member, check_address, check_name

A = Member("a", 0, "10.0.0.1:7700", ("b",), 11)
B = Member("b", 1, "[fe80::2]:7700", ("a",), 12)
CONFIG = {"rounds": 3, "clusters": 2, "device": "cpu", "data": {"name": "digits", "mixture": "iid"}}
PAIR = Manifest("0123456789abcdef" * 2, True, CONFIG, (1, 8, 8), 10, 650, "float32", (A, B))


def test_a_manifest_is_the_same_after_it_was_saved(tmp_path):
    PAIR.save(tmp_path / "manifest.json")
    assert Manifest.load(tmp_path / "manifest.json") == PAIR
    assert PAIR.member("b") == B


def test_an_unknown_member_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"no node 'node-11' in the network; did you mean 'node-1'\?"
    ):
        replace(PAIR, members=(replace(A, name="node-1"), replace(B, name="x"))).member("node-11")


@pytest.mark.parametrize(
    "change",
    [
        {"network": "f" * 32},
        {"config": CONFIG | {"rounds": 4}},
        {"config": CONFIG | {"data": {"name": "digits", "mixture": "rotation"}}},
        {"shape": (1, 8, 9)},
        {"classes": 11},
        {"size": 651},
        {"dtype": "float64"},
    ],
)
def test_the_agreement_covers_all_that_peers_must_have_in_common(change):
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
def test_the_agreement_leaves_out_who_they_are_where_their_data_lie_and_how_they_compute(change):
    assert replace(PAIR, **change).agreement == PAIR.agreement


def test_the_agreement_is_the_sha256_of_its_canonical_json(tmp_path):
    text = (
        '{"classes":10,"config":{"clusters":2,"data":{"mixture":"iid"},"rounds":3},"dtype":"float32",'
        '"network":"0123456789abcdef0123456789abcdef","shape":[1,8,8],"size":650}'
    )
    assert PAIR.agreement == hashlib.sha256(text.encode()).hexdigest()
    PAIR.save(tmp_path / "m")
    assert Manifest.load(tmp_path / "m").agreement == PAIR.agreement


def test_a_manifest_is_read_without_torch(tmp_path):
    PAIR.save(tmp_path / "m")
    code = "import sys, pathlib; from fedspd.node.identity.manifest import Manifest; Manifest.load(pathlib.Path(sys.argv[1]))"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "False\n"


def without(key):
    def change(tree):
        del tree[key]

    return change


def put(value, *place):
    def change(tree):
        for step in place[:-1]:
            tree = tree[step]
        tree[place[-1]] = value

    return change


WRONG = {
    "format": (put(2, "format"), "format = 2; expected 1"),
    "no format": (without("format"), "format = null; expected 1"),
    "missing": (without("size"), "the key 'size' is missing"),
    "missing in a member": (
        lambda tree: tree["members"][1].pop("client"),
        "the key 'members.1.client' is missing",
    ),
    "unknown": (put(1, "sise"), "the key 'sise' is unknown"),
    "unknown in a member": (put(1, "members", 0, "nam"), "the key 'members.0.nam' is unknown"),
    "text for a number": (put("650", "size"), 'size = "650": expected a valid integer'),
    "true for a number": (put(True, "classes"), "classes = true: expected a valid integer"),
    "fraction": (
        put(1.5, "members", 0, "client"),
        "members.0.client = 1.5: expected a valid integer",
    ),
    "number for true": (put(1, "secure"), "secure = 1: expected a valid boolean"),
    "list for a table": (put([], "config"), "config = []: expected"),
    "empty config": (put({}, "config"), "config.clusters = null: expected a whole number"),
    "text for clusters": (
        put("two", "config", "clusters"),
        'config.clusters = "two": expected a whole number',
    ),
    "list for data": (put([], "config", "data"), "config.data = []: expected a table"),
    "dtype": (put("float16", "dtype"), "dtype = \"float16\": expected 'float32' or 'float64'"),
    "network": (put("../etc", "network"), "network = '../etc': expected 32 hexadecimal digits"),
    "shape": (put([1, 0], "shape"), "shape = [1, 0]: expected"),
    "no shape": (put([], "shape"), "shape = []: expected"),
    "size": (put(0, "size"), "size = 0: expected at least 1"),
    "classes": (put(-1, "classes"), "classes = -1: expected at least 0"),
    "name": (put("../a", "members", 0, "name"), "'../a' is no name for a node"),
    "address": (
        put("10.0.0.1", "members", 0, "address"),
        "'10.0.0.1' is no address: expected host:port",
    ),
    "two of a name": (put("a", "members", 1, "name"), 'members.name = "a" belongs to 2 nodes'),
    "two of a number": (put(0, "members", 1, "client"), "members.client = 0 belongs to 2 nodes"),
    "negative number": (put(-1, "members", 1, "client"), "the node 'b' has client = -1"),
    "its own neighbour": (
        put(["b", "a"], "members", 0, "neighbours"),
        "the node 'a' is a neighbour of itself",
    ),
    "one-sided": (
        put([], "members", 0, "neighbours"),
        "'a' is a neighbour of 'b', but not the other way round",
    ),
    "nobody": (
        put(["b", "c"], "members", 0, "neighbours"),
        "the node 'a' has the neighbour 'c', who is no member",
    ),
    "twice": (
        put(["b", "b"], "members", 0, "neighbours"),
        "the node 'a' has a neighbour more than once",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_in_one_sentence_with_the_file_and_the_key(
    tmp_path, change, sentence
):
    path = tmp_path / "manifest.json"
    PAIR.save(path)
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError) as refused:
        Manifest.load(path)
    assert str(refused.value).startswith(f"'{path}'")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": 1, "size": NaN}', "\x00", "[" * 100_000]
)
def test_what_is_no_manifest_is_refused(tmp_path, text):
    (tmp_path / "m").write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path / "m")):
        Manifest.load(tmp_path / "m")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="none' cannot be read"):
        Manifest.load(tmp_path / "none")


LEAVES = st.none() | st.booleans() | st.integers() | st.text()


@settings(max_examples=30)
@given(tree=st.recursive(LEAVES, lambda kids: st.lists(kids) | st.dictionaries(st.text(), kids)))
def test_any_value_at_any_key_is_taken_or_refused(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("any") / "m"
    for key in ("network", "config", "shape", "members", "size"):
        path.write_text(json.dumps({"format": 1, **asdict(PAIR), key: tree}))
        try:
            loaded = Manifest.load(path)
        except ConfigError:
            continue
        assert loaded == replace(PAIR, **{key: getattr(loaded, key)})


@pytest.mark.parametrize("name", ["a", "node-0", "0", "a" * 32, "a--b"])
def test_names_of_nodes(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "A", "a" * 33, "-a", "a-", "a.b", "a b", "a/b", "ä", "a\n"])
def test_what_is_no_name_of_a_node(name):
    with pytest.raises(ConfigError, match="is no name for a node"):
        check_name(name)


@pytest.mark.parametrize(
    "address", ["10.0.0.7:1", "[::1]:7700", "[fe80::1%eth0]:7700", "gate-2.plant.example:65535"]
)
def test_addresses(address):
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":7700",
        "a",
        "a:",
        "a:0",
        "a:65536",
        "a:7700 ",
        "::1:7700",
        "a b:1",
        "a:١",
        "a:1\n",
        "a&b=c:1",
    ],
)
def test_what_is_no_address(address):
    with pytest.raises(ConfigError, match="is no address: expected host:port"):
        check_address(address)
