"""All nodes of a network as processes on this machine, each running `fedspd node run`."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from fedspd.config import ExperimentConfig, as_dict, validate
from fedspd.core.errors import NodeError, StorageError
from fedspd.core.scores import ACCURACY, OTHER_SCORES, RMSE
from fedspd.node.host import provisioning
from fedspd.node.identity.manifest import Manifest
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

POLL_SECONDS = 0.5  # between two looks at the journals, which other processes write
STOP_SECONDS = 60.0  # for a node to finish its step before it is killed
MAX_RESTARTS = 3  # of a node that is killed repeatedly
TAIL_BYTES = 1 << 16  # enough for one line of a journal
PROGRAM = "from fedspd.cli.main import main; main()"


class NodeProcess:
    """The process of one node, with the last event of its journal."""

    def __init__(self, bundle: Path) -> None:
        self.name, self.bundle = bundle.name, bundle
        self.restarts = 0
        self.last: Json = {}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PROGRAM, "node", "run", "--bundle", str(self.bundle)]
        # the user of this folder starts the nodes, so its modules may be theirs, too
        paths = [path for path in (os.environ.get("PYTHONPATH"), os.getcwd()) if path]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        with open(self.bundle / "log.txt", "ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )

    def refresh(self) -> None:
        """Read the journal's last event; restart a killed node, as a service manager would."""
        path = self.bundle / "state" / "events.jsonl"
        if path.exists() and (line := _last_line(path)):
            self.last = json.loads(line)
        was_killed = (self.process.poll() or 0) < 0
        if was_killed and self.restarts < MAX_RESTARTS:
            self.restarts += 1
            self.process = self._start()

    @property
    def is_done(self) -> bool:
        """Whether the node has finished every round and the final phase."""
        return self.last.get("event") == "final"

    @property
    def state(self) -> str:
        """Return the state of the process in a few words."""
        code = self.process.poll()
        if code is not None:
            return f"failed ({code})" if code else "done" if self.is_done else "left"
        state = "running" if self.last else "starting"
        return f"{state}, restarted {self.restarts}x" if self.restarts else state

    @property
    def reason(self) -> str:
        """Return the last line of the log, which says why the node failed."""
        return _last_line(self.bundle / "log.txt").decode(errors="replace").removeprefix("fedspd: ")


Listener = Callable[[Sequence[NodeProcess]], None]


def create(config: ExperimentConfig, folder: Path) -> None:
    """Create certificates and bundles for free addresses of this machine."""
    names = [f"node-{i}" for i in range(config.clients)]
    addresses = dict(zip(names, _free_addresses(len(names)), strict=True))
    provisioning.create(config, folder, addresses=addresses)


def read_config(folder: Path) -> ExperimentConfig:
    """Return the config of the network in the folder."""
    return validate(Manifest.load(folder / "network.json").config)


def check_same_config(given: ExperimentConfig, stored: ExperimentConfig, folder: Path) -> None:
    """Refuse to continue a network with another config."""
    before, now = as_dict(stored), as_dict(given)
    differing = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    if differing:
        raise StorageError(
            f"--out {folder}: holds a network of another config, which differs in "
            f"{', '.join(differing)}; expected the same. Give no config to continue this "
            "network, or another --out for a new one."
        )


def up(
    folder: Path,
    config: ExperimentConfig,
    listener: Listener,
    poll_seconds: float = POLL_SECONDS,
) -> Json:
    """Run every node until all are done; return a summary. Ctrl-C lets each commit its step."""
    addresses = _find_addresses(folder, config.clients)
    _check_free(addresses)
    nodes: list[NodeProcess] = []
    try:
        nodes += (NodeProcess(folder / "nodes" / name) for name in addresses)
        while any(node.process.poll() is None for node in nodes):
            time.sleep(poll_seconds)
            for node in nodes:
                node.refresh()
            listener(nodes)
    except BaseException:
        _stop(nodes)
        raise
    if failed := [node for node in nodes if node.process.returncode]:
        first = failed[0]
        raise NodeError(f"{first.name} failed: {first.reason} (See '{first.bundle / 'log.txt'}'.)")
    summary = summarise(nodes)
    RunFolder(folder).write("up.json", summary)
    return summary


def _find_addresses(folder: Path, clients: int) -> dict[str, str]:
    """Return the addresses of all nodes but revoked ones and newcomers, who bring their data."""
    members = [
        node
        for node in provisioning.show(folder)["nodes"]
        if node["client"] < clients and not node["revoked"]
    ]
    for member in members:
        if not (folder / "nodes" / member["name"]).is_dir():
            raise StorageError(
                f"--out {folder}: the bundle of {member['name']} is not in '{folder / 'nodes'}'; "
                "expected the bundles of all nodes. Copy it back."
            )
    return {member["name"]: member["address"] for member in members}


def summarise(nodes: Sequence[NodeProcess]) -> Json:
    """Return the last result of every node and the mean of every score."""
    names = [score.name for score in (RMSE, *OTHER_SCORES)]
    names = [ACCURACY.name, *(name for name in names if any(name in node.last for node in nodes))]
    fields = ("round", *names, "mixture", "hash")
    scores = {name: [node.last.get(name) for node in nodes] for name in names}
    known = {name: [s for s in own if s is not None] for name, own in scores.items()}
    return {
        "nodes": {node.name: {key: node.last.get(key) for key in fields} for node in nodes},
        **{name: sum(own) / len(own) if own else None for name, own in known.items()},
    }


def _stop(nodes: Sequence[NodeProcess]) -> None:
    for node in nodes:
        node.process.terminate()
    end = time.monotonic() + STOP_SECONDS
    for node in nodes:
        try:
            node.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.process.kill()


def _last_line(path: Path) -> bytes:
    """Return the last complete line: the next one may be half written."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        complete, _, _ = file.read().rpartition(b"\n")
    return complete.rpartition(b"\n")[2]


def _check_free(addresses: Mapping[str, str]) -> None:
    """Refuse addresses in use before any node runs: the others would wait for that one."""
    for name, address in addresses.items():
        host, _, port = address.rpartition(":")
        try:
            family, _, _, _, socket_address = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )[0]
            with closing(socket.socket(family)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(socket_address)
        except OSError as error:
            raise NodeError(
                f"{name} cannot listen on {address} ({error.strerror}): is the network up already? "
                "Stop the process that has the port, or create a new network with another --out."
            ) from None


def _free_addresses(count: int) -> list[str]:
    """Return addresses with different ports; all are bound at once, so none is drawn twice."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((provisioning.HOST, 0))
        ports = [one.getsockname()[1] for one in sockets]
        return [f"{provisioning.HOST}:{port}" for port in ports]
    finally:
        for one in sockets:
            one.close()
