"""A node whose disk is full, or whose journal is damaged: it stops with a sentence, and what it had stays as it was."""

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.fleet import Fleet
from chaos.hosts import Machine, local
from fedspd.config import ExperimentConfig, validate
from fedspd.core.errors import StorageError
from fedspd.node.host import start
from fedspd.node.host.bundle import open_bundle

REFUSED = StorageError.exit_code


def alone(rounds: int) -> ExperimentConfig:
    """A network of one: nobody is waited for."""
    tree = {
        "clients": 1,
        "rounds": rounds,
        "topology": {"kind": "complete"},
        "data": {"examples": 50, "test_examples": 20},
    }
    return validate({**tree, "model": {"name": "mlp", "hidden": 16}})


def here() -> list[Machine]:
    return [Machine(None, machine.address, machine.address) for machine in local(1)]


def contents(folder: Path) -> dict[str, str]:
    """Of what counts: not the lock, nor the port of a node that ran."""
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".lock", "status.json")
    ]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


# ---- a disk that is full


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Two megabytes that are nobody else's, at the place of the node's state."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "fedspd-test", str(folder)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mounting, capture_output=True, check=False).returncode
    ):
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return filler
    raise AssertionError("the disk has no end")


def test_a_full_disk_stops_a_node_and_costs_it_nothing(tmp_path, small_disk):
    fleet = Fleet(alone(rounds=100_000), tmp_path / "plant", here())
    node = fleet.nodes["node-0"]
    (node.bundle / "state").symlink_to(small_disk)
    with fleet:
        fleet.until(lambda: fleet.everyone_at(3))
        filler = fill(small_disk)
        fleet.until(lambda: not node.running)
        assert node.process is not None
        assert node.process.returncode == REFUSED
        log = (node.bundle / "log.txt").read_text()
        assert "the disk is full" in log
        assert "Traceback" not in log
        before = node.committed()
        assert before.count(b"\n") >= 3

        filler.unlink()
        fleet.restart("node-0")
        done = before.count(b"\n")
        fleet.until(lambda: fleet.everyone_at(done + 2))
        fleet.leave()
    rounds = [json.loads(line)["round"] for line in node.journal.read_text().splitlines()]
    assert node.journal.read_bytes().startswith(before)
    assert rounds == list(range(1, len(rounds) + 1))


# ---- a journal that is damaged


@pytest.fixture
def bundle(tmp_path) -> Path:
    """Of a node that has done three rounds and its final phase."""
    folder = Fleet(alone(rounds=3), tmp_path / "plant", here()).nodes["node-0"].bundle
    start.run(open_bundle(folder))
    return folder


def newest(bundle: Path, name: str) -> Path:
    (found,) = (bundle / "state" / "checkpoints").glob(f"round-000004/{name}")
    return found


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


DAMAGES = {
    "a bit of the model": lambda bundle: flip(newest(bundle, "part-*.safetensors")),
    "the model is gone": lambda bundle: newest(bundle, "part-*.safetensors").unlink(),
    "half a checkpoint": lambda bundle: cut(newest(bundle, "checkpoint.json")),
    "a line of the journal": lambda bundle: (bundle / "state/events.jsonl").write_bytes(
        (bundle / "state/events.jsonl").read_bytes().replace(b'"round":2', b'"round:2\0', 1)
    ),
    "the end of the journal is gone": lambda bundle: cut(bundle / "state/events.jsonl"),
    "the journal is gone": lambda bundle: (bundle / "state/events.jsonl").unlink(),
    "another node's": lambda bundle: (bundle / "state/run.json").write_text(
        (bundle / "state/run.json").read_text().replace("node-0", "node-9")
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_journal_is_refused_and_left_as_it_is(bundle, damage):
    DAMAGES[damage](bundle)
    before = contents(bundle)
    with pytest.raises(StorageError, match=re.escape(str(bundle / "state"))):
        start.run(open_bundle(bundle))
    assert contents(bundle) == before
