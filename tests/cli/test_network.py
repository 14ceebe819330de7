"""The commands of `fedspd network`."""

import json
import subprocess
import sys

import pytest

from fedspd.cli.main import execute
from fedspd.node.identity.manifest import Manifest

CONFIG = 'clients = 4\n[topology]\nkind = "ring"\n[model]\nname = "linear"\n'


@pytest.fixture
def config(here):
    """The file plant.toml in the working folder."""
    (here / "plant.toml").write_text(CONFIG)
    return here / "plant.toml"


@pytest.fixture
def plant(here, config):
    """A network of four nodes in plant/."""
    assert execute(["network", "create", "plant.toml"]) == 0
    return here / "plant"


def error_of(words: list[str], capsys) -> str:
    """Return the line that rejects a command."""
    assert execute(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedspd: ")
    return line


def test_network_is_created_extended_and_revoked(here, config, capsys):
    assert execute(["network", "create", "plant.toml"]) == 0
    created, local, copy, secret = capsys.readouterr().out.splitlines()
    assert created.endswith(" with 4 nodes.")
    assert local.endswith("--addresses sets those of devices.")
    assert copy == "Copy each folder in plant/nodes to its device."
    assert secret == "Keep plant/ca.key secret and on this machine: it can add nodes."
    assert execute(["network", "add", "new", "--neighbours", "node-0,node-2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Added node new: client 4, address 127.0.0.1:7704.",
        "Its certificate is valid for 365 days.",
        "Copy plant/nodes/new to its device.",
    ]
    assert execute(["network", "revoke", "node-1", "--network", str(here / "plant")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Revoked node node-1.",
        f"Copy {here}/plant/revoked.crl into the bundle of every device.",
    ]
    assert execute(["network", "show", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    nodes = {node["name"]: node for node in json.loads(line)["nodes"]}
    assert list(nodes) == ["node-0", "node-1", "node-2", "node-3", "new"]
    assert [node["revoked"] for node in nodes.values()] == [False, True, False, False, False]
    assert nodes["node-0"]["neighbours"] == ["node-1", "node-3", "new"]


def test_show_prints_a_table_of_the_nodes(plant, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    execute(["network", "revoke", "node-2"])
    capsys.readouterr()
    assert execute(["network", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == f"Network {Manifest.load(plant / 'network.json').network}"
    heads = [cell.strip() for cell in lines[2].strip("┃").split("┃")]
    assert heads == ["name", "client", "address", "neighbours", "certificate until", "revoked"]
    (line,) = [line for line in lines if "127.0.0.1:7702" in line]
    name, client, _, neighbours, _, revoked = (cell.strip() for cell in line.strip("│").split("│"))
    assert (name, client, neighbours, revoked) == ("node-2", "2", "node-1, node-3", "yes")


def test_show_never_cuts_off_an_address(plant, capsys, monkeypatch):
    """The operator copies it to a firewall; 80 columns are usual, and those of a pipe."""
    monkeypatch.setenv("COLUMNS", "60")
    assert execute(["network", "show"]) == 0
    out = capsys.readouterr().out
    assert all(f"127.0.0.1:{port}" in out for port in (7700, 7701, 7702, 7703))


def test_create_takes_names_addresses_shape_and_values(here, config, capsys):
    (here / "addresses.toml").write_text(
        'd = "10.0.0.4:1"\nc = "10.0.0.3:1"\nb = "10.0.0.2:1"\na = "10.0.0.1:1"\n'
    )
    options = "--out else --names a,b,c,d --addresses addresses.toml --days 10"
    example = "--shape 1,28,28 --classes 10"
    words = f"network create plant.toml rounds=7 seed=3 {options} {example}".split()
    assert execute(words) == 0
    manifest = Manifest.load(here / "else/network.json")
    addresses = [(member.name, member.address) for member in manifest.members]
    assert addresses == [(name, f"10.0.0.{i}:1") for i, name in enumerate("abcd", 1)]
    assert (manifest.shape, manifest.size) == ((1, 28, 28), 7850)
    assert (manifest.config["rounds"], manifest.config["seed"]) == (7, 3)
    assert manifest.secure
    assert capsys.readouterr().err == ""


def test_create_warns_of_plaintext(here, config, capsys):
    create = ["network", "create", "plant.toml", "--insecure-plaintext"]
    assert execute([*create, "--host", "10.0.0.1", "--port", "80"]) == 0
    assert "anyone can read, alter and forge its messages" in capsys.readouterr().err
    manifest = Manifest.load(here / "plant/network.json")
    assert (manifest.secure, manifest.members[3].address) == (False, "10.0.0.1:83")
    execute(["network", "show"])
    assert "(plaintext)" in capsys.readouterr().out


def test_plaintext_network_cannot_revoke_and_needs_new_manifests(here, config, capsys):
    execute(["network", "create", "plant.toml", "--insecure-plaintext"])
    capsys.readouterr()
    error = error_of(["network", "revoke", "node-1"], capsys)
    assert "cannot be revoked: in a plaintext network" in error
    assert execute(["network", "add", "new", "--neighbours", "node-0,node-2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Copy the new manifest.json of node-0, node-2 to their devices and restart them."


MISTAKES = {
    "create": "Missing argument 'CONFIG'",
    "create none.toml": "config = 'none.toml': no such file; expected a TOML file, and KEY=VALUE ",
    "create plant.toml topology.kind=star": "peers have no server; expected another kind. Use 'co",
    "create plant.toml rounds=0": "rounds = 0",
    "create plant.toml --out .": "not an empty folder",
    "create plant.toml --shape 1,2": "--shape and --classes: only one is given",
    "create plant.toml --classes 2": "--shape and --classes: only one is given",
    "create plant.toml --shape 1,x --classes 2": "--shape 1,x: not a shape; expected integers",
    "create plant.toml --shape 1,,0 --classes 2": "--shape 1,,0: not a shape; expected integers",
    "create plant.toml --shape 1 --classes -2": "--classes",
    "create plant.toml --port 0": "--port",
    "create plant.toml --days 5000": "days = 5000: not a possible lifetime of a certificate; exp",
    "create plant.toml --addresses none.toml": "--addresses none.toml: cannot be read",
    "add x --neighbours a": "--network plant: not a network",
    "add x": "Missing option '--neighbours'",
    "revoke x --network elsewhere": "--network elsewhere: not a network",
    "show": "--network plant: not a network",
}


@pytest.mark.parametrize(("words", "sentence"), MISTAKES.items(), ids=MISTAKES)
def test_network_reports_a_mistake_in_one_line_and_writes_nothing(
    here, config, words, sentence, capsys
):
    assert sentence in error_of(["network", *words.split()], capsys)
    assert [path.name for path in here.iterdir()] == ["plant.toml"]


RUN = """
import sys
from fedspd.cli.main import execute
code = execute(sys.argv[1:])
print("torch" in sys.modules, code)
"""


@pytest.mark.parametrize(
    "words", ["--help", "network --help", "network create --help", "network show"]
)
def test_help_and_show_do_not_import_torch(plant, words):
    command = [sys.executable, "-c", RUN, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False 0"


def test_network_names_a_missing_extra(here):
    code = f"import sys; sys.modules['cryptography'] = None\n{RUN}"
    command = [sys.executable, "-c", code, "network", "show"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False 2"
    assert done.stderr == (
        "fedspd: A network of peers needs the extra 'node', which is not installed: "
        "pip install 'fedspd[node]'.\n"
    )
