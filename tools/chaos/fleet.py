"""The nodes of one network as processes, each on a machine of its own, watched through their journals alone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from chaos.hosts import Machine
from fedspd.config import ExperimentConfig
from fedspd.node.host import provisioning

PROGRAM = "from fedspd.cli.main import main; main()"
LOOK = 0.05  # seconds between two looks at the journals
LIMIT = 600.0  # seconds for anything to happen: far more than any machine needs
Json = dict[str, Any]


class Seen(NamedTuple):
    """One line of a node's journal, and when it was first seen."""

    at: float
    node: str
    event: Json


class Killed(NamedTuple):
    """What a node had on disk when it was killed."""

    node: str
    committed: bytes  # the journal up to its last checkpoint
    loose: int  # lines behind that: the round that was being committed


class Stuck(Exception):
    """What was waited for has not happened, and cannot any more."""


@dataclass
class Node:
    name: str
    machine: Machine
    bundle: Path
    program: str = PROGRAM
    environment: Mapping[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None
    read: int = 0  # bytes of the journal
    loose: bytes = (
        b""  # behind its last checkpoint when the node was restarted: the node will take that back
    )

    @property
    def journal(self) -> Path:
        return self.bundle / "state" / "events.jsonl"

    def restart(self) -> None:
        self.read = len(self.committed())
        self.loose = self.journal.read_bytes()[self.read :] if self.journal.exists() else b""
        self.start()

    def start(self) -> None:
        place = ["ip", "netns", "exec", self.machine.space] if self.machine.space else []
        command = [
            *place,
            sys.executable,
            "-c",
            self.program,
            "node",
            "run",
            "--bundle",
            str(self.bundle),
            "--listen",
            self.machine.listen,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        with open(self.bundle / "log.txt", "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def news(self) -> list[Json]:
        """Whole lines that are new."""
        if not self.journal.exists():
            return []
        with open(self.journal, "rb") as file:
            file.seek(self.read)
            found = file.read()
        if self.loose and found.startswith(self.loose):
            return []  # the node was restarted, and has not yet looked at its journal
        self.loose = b""
        whole, newline, _ = found.rpartition(b"\n")
        self.read += len(whole + newline)
        return [json.loads(line) for line in whole.splitlines()]

    def committed(self) -> bytes:
        """The journal as far as the newest checkpoint goes, read without touching anything."""
        newest = max((self.bundle / "state" / "checkpoints").glob("round-??????"), default=None)
        size = json.loads((newest / "checkpoint.json").read_text())["events"] if newest else 0
        return self.journal.read_bytes()[:size] if size else b""


class Fleet:
    def __init__(self, config: ExperimentConfig, folder: Path, machines: Sequence[Machine]) -> None:
        addresses = {f"node-{i}": machine.address for i, machine in enumerate(machines)}
        manifest = provisioning.create(config, folder, addresses=addresses)
        self.folder, self.rounds = folder, config.rounds
        self.nodes = {
            name: Node(name, machine, folder / "nodes" / name)
            for name, machine in zip(addresses, machines, strict=True)
        }
        self.neighbours = {member.name: list(member.neighbours) for member in manifest.members}
        self.history: list[Seen] = []
        self.kills: list[Killed] = []

    def __enter__(self) -> "Fleet":
        for node in self.nodes.values():
            node.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for node in self.nodes.values():
            if node.process is not None:
                node.process.kill()
                node.process.wait()

    def look(self) -> None:
        for name, node in self.nodes.items():
            self.history += [Seen(time.monotonic(), name, event) for event in node.news()]

    def until(self, condition: Callable[[], bool], limit: float = LIMIT) -> None:
        """Wait for something to stand in the journals."""
        end = time.monotonic() + limit
        while True:
            over = (
                time.monotonic() > end or not self.running()
            )  # before the look, which is then the last one
            self.look()
            if condition():
                return
            if over:
                raise Stuck(f"waited {limit:g} s in vain, or all nodes have ended: {self._where()}")
            time.sleep(LOOK)

    def running(self) -> bool:
        return any(node.running for node in self.nodes.values())

    def pause(self, seconds: float) -> None:
        """Let time pass, with open eyes."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end)

    def wait(self) -> None:
        """Until every node is done."""
        self.until(lambda: not self.running())
        if failed := {
            name: code
            for name, node in self.nodes.items()
            if node.process and (code := node.process.returncode)
        }:
            raise Stuck(f"nodes that failed, with their exit codes: {failed}")

    def kill(self, name: str) -> float:
        """As the power cut does; returns when."""
        node = self.nodes[name]
        assert node.process is not None
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
        at = time.monotonic()
        committed = node.committed()
        whole = node.journal.read_bytes() if node.journal.exists() else b""
        self.kills.append(Killed(name, committed, whole.count(b"\n") - committed.count(b"\n")))
        return at

    def leave(self) -> None:
        """Tell all of them to finish their step, commit and go."""
        for node in self.nodes.values():
            if node.process is not None:
                node.process.terminate()
        self.wait()

    def restart(self, name: str) -> float:
        self.look()
        self.nodes[name].restart()
        return time.monotonic()

    # ---- what the journals say

    def of(self, name: str, after: float = 0.0) -> list[Seen]:
        return [seen for seen in self.history if seen.node == name and seen.at > after]

    def everyone_at(self, round: int) -> bool:
        return all(
            any(seen.event["round"] >= round for seen in self.of(name)) for name in self.nodes
        )

    def without(self, name: str, after: float) -> Seen | None:
        """The first round that a neighbour did without this node."""
        return next(
            (
                seen
                for seen in self.history
                if seen.at > after and name in seen.event.get("missing", ())
            ),
            None,
        )

    def hearing(self, name: str, after: float) -> dict[str, Seen]:
        """The first round in which each of its neighbours heard this node."""
        found: dict[str, Seen] = {}
        for seen in self.history:
            if seen.at > after and name in seen.event.get("received", ()):
                found.setdefault(seen.node, seen)
        return found

    def _where(self) -> str:
        last = {
            name: seen[-1].event["round"] if (seen := self.of(name)) else 0 for name in self.nodes
        }
        return ", ".join(f"{name} has done round {round}" for name, round in last.items())
