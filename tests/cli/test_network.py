"""fedspd network, as an operator calls it."""

import json
import subprocess
import sys

import pytest

from fedspd.cli.main import guarded
from fedspd.node.identity.manifest import Manifest

CONFIG = 'clients = 4\n[topology]\nkind = "ring"\n[model]\nname = "linear"\n'


@pytest.fixture
def plant(here):
    """A network of four nodes in plant/, of the config plant.toml."""
    (here / "plant.toml").write_text(CONFIG)
    assert guarded(["network", "create", "plant.toml"]) == 0
    return here / "plant"


def refused(words: list[str], capsys) -> str:
    """The one line that says why."""
    assert guarded(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("fedspd: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_from_nothing_to_a_network_that_changes(here, capsys):
    (here / "plant.toml").write_text(CONFIG)
    assert guarded(["network", "create", "plant.toml"]) == 0
    assert "4 nodes: copy each folder of plant/nodes to its device" in capsys.readouterr().out
    assert guarded(["network", "add", "new", "--neighbours", "node-0,node-2"]) == 0
    assert (
        "Node new is client 4 at 127.0.0.1:7704: copy plant/nodes/new to its device."
        in capsys.readouterr().out
    )
    assert guarded(["network", "revoke", "node-1", "--network", str(here / "plant")]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith(f"Copy {here}/plant/revoked.crl into the bundle of every device")
    )
    assert guarded(["network", "show", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    nodes = {node["name"]: node for node in json.loads(line)["nodes"]}
    assert list(nodes) == ["node-0", "node-1", "node-2", "node-3", "new"]
    assert [node["revoked"] for node in nodes.values()] == [False, True, False, False, False]
    assert nodes["node-0"]["neighbours"] == ["node-1", "node-3", "new"]


def test_a_table_shows_who_is_there(plant, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    guarded(["network", "revoke", "node-2"])
    capsys.readouterr()
    assert guarded(["network", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == f"Network {Manifest.load(plant / 'network.json').network}"
    assert [
        word
        for word in ("name", "client", "address", "neighbours", "certificate until", "revoked")
        if word not in lines[2]
    ] == []
    row = next(line for line in lines if "node-2" in line and "127.0.0.1:7702" in line)
    assert "node-1, node-3" in row
    assert "yes" in row


def test_everything_that_can_be_said_of_a_new_network(here, capsys):
    (here / "plant.toml").write_text(CONFIG)
    (here / "addresses.toml").write_text(
        'd = "10.0.0.4:1"\nc = "10.0.0.3:1"\nb = "10.0.0.2:1"\na = "10.0.0.1:1"\n'
    )
    words = [
        "--out",
        "else",
        "--names",
        "a,b,c,d",
        "--addresses",
        "addresses.toml",
        "--shape",
        "1,28,28",
        "--classes",
        "10",
    ]
    assert (
        guarded(["network", "create", "plant.toml", "rounds=7", "seed=3", *words, "--days", "10"])
        == 0
    )
    manifest = Manifest.load(here / "else/network.json")
    assert [(member.name, member.address) for member in manifest.members] == [
        (n, f"10.0.0.{i}:1") for i, n in enumerate("abcd", 1)
    ]
    assert (manifest.shape, manifest.size, manifest.config["rounds"], manifest.config["seed"]) == (
        (1, 28, 28),
        7850,
        7,
        3,
    )
    assert manifest.secure
    assert capsys.readouterr().err == ""


def test_plaintext_is_warned_of(here, capsys):
    (here / "plant.toml").write_text(CONFIG)
    assert (
        guarded(
            [
                "network",
                "create",
                "plant.toml",
                "--insecure-plaintext",
                "--host",
                "10.0.0.1",
                "--port",
                "80",
            ]
        )
        == 0
    )
    assert "may talk in plaintext" in capsys.readouterr().err
    manifest = Manifest.load(here / "plant/network.json")
    assert (manifest.secure, manifest.members[3].address) == (False, "10.0.0.1:83")
    guarded(["network", "show"])
    assert "which allows plaintext" in capsys.readouterr().out


def test_in_plaintext_nobody_is_shut_out_and_neighbours_must_be_told(here, capsys):
    (here / "plant.toml").write_text(CONFIG)
    guarded(["network", "create", "plant.toml", "--insecure-plaintext"])
    capsys.readouterr()
    assert "cannot be revoked: in a plaintext network" in refused(
        ["network", "revoke", "node-1"], capsys
    )
    assert guarded(["network", "add", "new", "--neighbours", "node-0,node-2"]) == 0
    assert (
        "give node-0, node-2 the new manifest.json of their bundles, and restart them"
        in capsys.readouterr().out
    )


SLIPS = {
    "no config": (["create"], "Missing argument 'CONFIG'"),
    "missing config": (
        ["create", "none.toml"],
        "config = 'none.toml': no such file; expected a TOML file.",
    ),
    "star": (
        ["create", "ring.toml", "topology.kind=star"],
        "peers have no server; expected another kind. Use 'complete'",
    ),
    "value": (["create", "ring.toml", "rounds=0"], "rounds = 0"),
    "existing": (["create", "ring.toml", "--out", "."], "exists and is not an empty folder"),
    "shape alone": (["create", "ring.toml", "--shape", "1,2"], "--shape and --classes go together"),
    "classes alone": (
        ["create", "ring.toml", "--classes", "2"],
        "--shape and --classes go together",
    ),
    "shape": (
        ["create", "ring.toml", "--shape", "1,x", "--classes", "2"],
        "--shape 1,x: expected whole numbers above 0",
    ),
    "no shape": (
        ["create", "ring.toml", "--shape", "1,,0", "--classes", "2"],
        "--shape 1,,0: expected whole numbers above 0",
    ),
    "classes": (["create", "ring.toml", "--shape", "1", "--classes", "-2"], "--classes"),
    "port": (["create", "ring.toml", "--port", "0"], "--port"),
    "days": (
        ["create", "ring.toml", "--days", "5000"],
        "days = 5000: not a possible lifetime of a certificate; expected 1 to 365",
    ),
    "addresses": (
        ["create", "ring.toml", "--addresses", "none.toml"],
        "--addresses none.toml: cannot be read",
    ),
    "add": (["add", "x", "--neighbours", "a"], "--network plant: not a network"),
    "no neighbours": (["add", "x"], "Missing option '--neighbours'"),
    "revoke": (["revoke", "x", "--network", "elsewhere"], "--network elsewhere: not a network"),
    "show": (["show"], "--network plant: not a network"),
}


@pytest.mark.parametrize(("words", "sentence"), SLIPS.values(), ids=SLIPS)
def test_a_slip_is_one_line_and_exit_code_2(here, words, sentence, capsys):
    (here / "ring.toml").write_text(CONFIG)
    assert sentence in refused(["network", *words], capsys)
    assert [path.name for path in here.iterdir()] == ["ring.toml"]


def test_help_and_show_need_no_torch(plant):
    code = "import sys; from fedspd.cli.main import guarded; code = guarded(sys.argv[1:]); print('torch' in sys.modules, code)"
    for words in (
        ["--help"],
        ["network", "--help"],
        ["network", "create", "--help"],
        ["network", "show", "--network", str(plant)],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60
        )
        assert done.stdout.splitlines()[-1] == "False 0"


def test_a_missing_extra_is_named(here):
    code = "import sys; sys.modules['cryptography'] = None; from fedspd.cli.main import guarded; sys.exit(guarded(['network', 'show']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert (
        done.stderr
        == "fedspd: A network of peers needs the extra 'node', which is not installed: pip install 'fedspd[node]'.\n"
    )
