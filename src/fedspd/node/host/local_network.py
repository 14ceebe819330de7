"""A whole network as real processes on this machine: what `fedspd node run` does on many devices, on one."""

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
from fedspd.node.host import provisioning
from fedspd.node.identity.manifest import Manifest
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

HOST = "127.0.0.1"
LOOK = 0.5  # seconds between two looks at the nodes
LEAVE = 60.0  # seconds for a node to finish its step
RESTARTS = 3  # of a node that is killed again and again
TAIL = 1 << 16  # bytes, enough for a line of a journal
NODE = "from fedspd.cli.main import main; main()"


class NodeProcess:
    """A node's process, and what its journal said last."""

    def __init__(self, bundle: Path) -> None:
        self.name, self.bundle = bundle.name, bundle
        self.restarts = 0
        self.last: Json = {}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", NODE, "node", "run", "--bundle", str(self.bundle)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.bundle / "log.txt", "ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )

    def look(self) -> None:
        """Take in what the journal says; whoever was killed is started again, as a service manager would."""
        path = self.bundle / "state" / "events.jsonl"
        if path.exists() and (line := _last_line(path)):
            self.last = json.loads(line)
        if (self.process.poll() or 0) < 0 and self.restarts < RESTARTS:
            self.restarts += 1
            self.process = self._start()

    @property
    def done(self) -> bool:
        return self.last.get("event") == "final"

    @property
    def state(self) -> str:
        code = self.process.poll()
        if code is None:
            return ("running" if self.last else "starting") + (
                f", restarted {self.restarts}x" if self.restarts else ""
            )
        return f"failed ({code})" if code else "done" if self.done else "left"

    @property
    def reason(self) -> str:
        """The last thing that it said."""
        return _last_line(self.bundle / "log.txt").decode(errors="replace").removeprefix("fedspd: ")


Listener = Callable[[Sequence[NodeProcess]], None]


def create(config: ExperimentConfig, folder: Path) -> None:
    """The network's certificates and bundles, with addresses on this machine that are free now."""
    names = [f"node-{i}" for i in range(config.clients)]
    provisioning.create(
        config, folder, addresses=dict(zip(names, _free_addresses(len(names)), strict=True))
    )


def config_of(folder: Path) -> ExperimentConfig:
    return validate(Manifest.load(folder / "network.json").config)


def refuse_other(config: ExperimentConfig, folder: Path) -> None:
    """Only what was begun is continued."""
    before, now = (as_dict(each) for each in (config_of(folder), config))
    if differing := sorted(
        key for key in before.keys() | now.keys() if before.get(key) != now.get(key)
    ):
        raise StorageError(
            f"'{folder}' holds a network of another config, which differs in {', '.join(differing)}: "
            "give no config to continue it as it is, or another --out for a new network."
        )


def up(folder: Path, listener: Listener, look: float = LOOK) -> Json:
    """Run every node until all are done; what each came to. Ctrl-C lets them finish their step and commit."""
    addresses = _addresses(folder)
    _refuse_taken(addresses)
    nodes: list[NodeProcess] = []
    try:
        nodes += (NodeProcess(folder / "nodes" / name) for name in addresses)
        while any(node.process.poll() is None for node in nodes):
            time.sleep(look)
            _look(nodes, listener)
    except BaseException:
        _stop(nodes)
        raise
    if failed := [node for node in nodes if node.process.returncode]:
        raise NodeError(
            f"{failed[0].name} failed: {failed[0].reason} (Its log is '{failed[0].bundle / 'log.txt'}'.)"
        )
    found = summary(nodes)
    RunFolder(folder).write("up.json", found)
    return found


def _addresses(folder: Path) -> dict[str, str]:
    """Of every node but the revoked, and the newcomers, who bring their own data."""
    clients = config_of(folder).clients
    members = [
        node
        for node in provisioning.show(folder)["nodes"]
        if node["client"] < clients and not node["revoked"]
    ]
    for member in members:
        if not (folder / "nodes" / member["name"]).is_dir():
            raise StorageError(
                f"The bundle of {member['name']} is not in '{folder / 'nodes'}': a network runs here only if all its bundles are."
            )
    return {member["name"]: member["address"] for member in members}


def summary(nodes: Sequence[NodeProcess]) -> Json:
    scores = [node.last["accuracy"] for node in nodes if node.last.get("accuracy") is not None]
    return {
        "nodes": {
            node.name: {key: node.last.get(key) for key in ("round", "accuracy", "mixture", "hash")}
            for node in nodes
        },
        "accuracy": sum(scores) / len(scores) if scores else None,
    }


def _look(nodes: Sequence[NodeProcess], listener: Listener) -> None:
    for node in nodes:
        node.look()
    listener(nodes)


def _stop(nodes: Sequence[NodeProcess]) -> None:
    for node in nodes:
        node.process.terminate()
    end = time.monotonic() + LEAVE
    for node in nodes:
        try:
            node.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.process.kill()


def _last_line(path: Path) -> bytes:
    """The last whole one: the next may be half written."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        whole, _, _ = file.read().rpartition(b"\n")
    return whole.rpartition(b"\n")[2]


def _refuse_taken(addresses: Mapping[str, str]) -> None:
    """Before any node runs: the others would wait for the one that cannot."""
    for name, address in addresses.items():
        host, _, port = address.rpartition(":")
        try:
            kind, _, _, _, place = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )[0]
            with closing(socket.socket(kind)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            raise NodeError(
                f"{name} cannot listen on {address} ({error.strerror}): is the network up already? "
                "Stop whatever has that port, or make a new network with another --out."
            ) from None


def _free_addresses(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [f"{HOST}:{one.getsockname()[1]}" for one in sockets]
    finally:
        for one in sockets:
            one.close()
