"""A full disk or a damaged journal stops a node with a sentence, and changes nothing."""

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.fleet import Fleet
from chaos.hosts import Host, local_hosts
from fedspd.config import ExperimentConfig, validate
from fedspd.core.errors import StorageError
from fedspd.node.host import start
from fedspd.node.host.bundle import open_bundle

REJECTED = StorageError.exit_code


def config_of_one(rounds: int) -> ExperimentConfig:
    """Return the config of a network with a single node, which waits for nobody."""
    return validate(
        {
            "clients": 1,
            "rounds": rounds,
            "topology": {"kind": "complete"},
            "data": {"examples": 50, "test_examples": 20},
            "model": {"name": "mlp", "hidden": 16},
        }
    )


def one_host() -> list[Host]:
    """Return a host without a relay."""
    return [Host(None, host.address, host.address) for host in local_hosts(1)]


def hash_files(folder: Path) -> dict[Path, str]:
    """Return the hash of every file but the lock and the port of a node that ran."""
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".lock", "status.json")
    ]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---- a full disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of two megabytes for the node's state."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "fedspd-test", str(folder)]
    has_mount = shutil.which("mount") is not None
    if not has_mount or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk with one file and return it."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return filler
    raise AssertionError("the disk is never full")


def test_full_disk_stops_a_node_without_loss(tmp_path, small_disk):
    fleet = Fleet(config_of_one(rounds=100_000), tmp_path / "plant", one_host())
    node = fleet.nodes["node-0"]
    (node.bundle / "state").symlink_to(small_disk)
    with fleet:
        fleet.wait_until(lambda: fleet.has_reached(4))  # round 3 has a checkpoint, 4 may have none
        filler = fill(small_disk)
        fleet.wait_until(lambda: not node.is_running)
        assert node.process is not None
        assert node.process.returncode == REJECTED
        log = (node.bundle / "log.txt").read_text()
        assert "the disk is full" in log
        assert "Traceback" not in log
        before = node.read_committed()
        done = before.count(b"\n")
        assert done >= 3

        filler.unlink()
        fleet.restart("node-0")
        fleet.wait_until(lambda: fleet.has_reached(done + 2))
        fleet.stop()
    rounds = [json.loads(line)["round"] for line in node.journal.read_text().splitlines()]
    assert node.journal.read_bytes().startswith(before)
    assert rounds == list(range(1, len(rounds) + 1))


# ---- a damaged journal


@pytest.fixture
def bundle(tmp_path) -> Path:
    """The bundle of a node that has done three rounds and its final phase."""
    fleet = Fleet(config_of_one(rounds=3), tmp_path / "plant", one_host())
    folder = fleet.nodes["node-0"].bundle
    start.run(open_bundle(folder))
    return folder


def newest(bundle: Path, name: str) -> Path:
    (found,) = (bundle / "state" / "checkpoints").glob(f"round-000004/{name}")
    return found


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


DAMAGES = {
    "a flipped bit of the model": lambda bundle: flip(newest(bundle, "part-*.safetensors")),
    "no model": lambda bundle: newest(bundle, "part-*.safetensors").unlink(),
    "a truncated checkpoint": lambda bundle: cut(newest(bundle, "checkpoint.json")),
    "a damaged line of the journal": lambda bundle: (bundle / "state/events.jsonl").write_bytes(
        (bundle / "state/events.jsonl").read_bytes().replace(b'"round":2', b'"round:2\0', 1)
    ),
    "a truncated journal": lambda bundle: cut(bundle / "state/events.jsonl"),
    "no journal": lambda bundle: (bundle / "state/events.jsonl").unlink(),
    "another node": lambda bundle: (bundle / "state/run.json").write_text(
        (bundle / "state/run.json").read_text().replace("node-0", "node-9")
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_node_rejects_a_damaged_journal_and_leaves_it_unchanged(bundle, damage):
    DAMAGES[damage](bundle)
    before = hash_files(bundle)
    with pytest.raises(StorageError, match=re.escape(str(bundle / "state"))):
        start.run(open_bundle(bundle))
    assert hash_files(bundle) == before
