"""The nodes of one network as processes, each on its own host, observed through their journals."""

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

from chaos.hosts import Host
from fedspd.config import ExperimentConfig
from fedspd.node.host import provisioning

PROGRAM = "from fedspd.cli.main import main; main()"
# A process that has loaded all modules, says so by a file, and begins when its input says so.
STANDBY = """\
import pathlib, sys
import fedspd.node.host.start
pathlib.Path({mark!r}).touch()
sys.stdin.readline() or sys.exit()
"""
POLL_SECONDS = 0.05  # between two reads of the journals
TIMEOUT_SECONDS = 600.0  # for any event: far more than any machine needs
Json = dict[str, Any]


class Observation(NamedTuple):
    """One line of a node's journal, and when it was first read."""

    at: float  # seconds of this process's clock
    node: str
    event: Json


class Kill(NamedTuple):
    """The journal of a node when it was killed."""

    node: str
    committed: bytes  # the journal up to its last checkpoint
    uncommitted: int  # lines after that: the round that was being committed


class StuckError(Exception):
    """An event that did not happen in time, or cannot happen any more."""


@dataclass
class FleetNode:
    """One node: its host, its bundle and its process."""

    name: str
    host: Host
    bundle: Path
    program: str = PROGRAM
    environment: Mapping[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None
    standby: "subprocess.Popen[bytes] | None" = None  # the process after a restart
    bytes_read: int = 0  # of the journal
    uncommitted: bytes = b""  # lines after the checkpoint, which a restarted node removes

    @property
    def journal(self) -> Path:
        return self.bundle / "state" / "events.jsonl"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the node's process."""
        self.process = self._launch(self.program, subprocess.DEVNULL)

    def prepare_restart(self) -> None:
        """Load the process that is to follow, and wait until it is ready."""
        mark = self.bundle / "loaded"
        program = STANDBY.format(mark=str(mark)) + self.program
        self.standby = self._launch(program, subprocess.PIPE)
        while not mark.exists():
            if self.standby.poll() is not None:
                raise StuckError(f"the second process of {self.name} ended before it began")
            time.sleep(POLL_SECONDS)

    def _launch(self, program: str, stdin: int) -> "subprocess.Popen[bytes]":
        namespace = self.host.namespace
        enter = ["ip", "netns", "exec", namespace] if namespace else []
        options = ["--bundle", str(self.bundle), "--listen", self.host.listen]
        command = [*enter, sys.executable, "-c", program, "node", "run", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        with open(self.bundle / "log.txt", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=stdin, env=environment)

    def restart(self) -> None:
        """Start the process again, and expect the journal to go on from its last checkpoint."""
        self.bytes_read = len(self.read_committed())
        self.uncommitted = self.read_journal(self.bytes_read)
        if self.standby is None:
            self.start()
            return
        self.process, self.standby = self.standby, None
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def end(self) -> None:
        """Kill all processes."""
        for process in (self.process, self.standby):
            if process is not None:
                process.kill()
                process.wait()

    def read_new_events(self) -> list[Json]:
        """Return the complete lines since the last call."""
        found = self.read_journal(self.bytes_read)
        if self.uncommitted and found.startswith(self.uncommitted):
            return []  # the restarted node has not read its journal yet
        self.uncommitted = b""
        complete, newline, _ = found.rpartition(b"\n")
        self.bytes_read += len(complete + newline)
        return [json.loads(line) for line in complete.splitlines()]

    def read_journal(self, start: int = 0) -> bytes:
        """Return the journal from some byte on; it is empty before the first round."""
        if not self.journal.exists():
            return b""
        with open(self.journal, "rb") as file:
            file.seek(start)
            return file.read()

    def read_committed(self) -> bytes:
        """Return the journal up to the newest checkpoint."""
        newest = max((self.bundle / "state" / "checkpoints").glob("round-??????"), default=None)
        size = json.loads((newest / "checkpoint.json").read_text())["events"] if newest else 0
        return self.read_journal()[:size]


class Fleet:
    """A context in which all nodes of a new network run."""

    def __init__(self, config: ExperimentConfig, folder: Path, hosts: Sequence[Host]) -> None:
        addresses = {f"node-{i}": host.address for i, host in enumerate(hosts)}
        manifest = provisioning.create(config, folder, addresses=addresses)
        self.folder, self.rounds = folder, config.rounds
        self.nodes = {
            name: FleetNode(name, host, folder / "nodes" / name)
            for name, host in zip(addresses, hosts, strict=True)
        }
        self.neighbours = {member.name: list(member.neighbours) for member in manifest.members}
        self.history: list[Observation] = []
        self.kills: list[Kill] = []

    def __enter__(self) -> "Fleet":
        for node in self.nodes.values():
            node.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for node in self.nodes.values():
            node.end()

    @property
    def is_running(self) -> bool:
        return any(node.is_running for node in self.nodes.values())

    # ---- waiting

    def poll(self) -> None:
        """Read the journals."""
        for name, node in self.nodes.items():
            events = node.read_new_events()
            self.history += [Observation(time.monotonic(), name, event) for event in events]

    def wait_until(
        self, condition: Callable[[], bool], timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Poll until the condition holds."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            # Asked before the poll, which is then the last one.
            is_over = time.monotonic() > deadline or not self.is_running
            self.poll()
            if condition():
                return
            if is_over:
                raise StuckError(
                    f"no progress for {timeout_seconds:g} s, or all nodes ended: {self._progress()}"
                )
            time.sleep(POLL_SECONDS)

    def wait_for(self, seconds: float) -> None:
        """Poll for some time."""
        end = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() >= end)

    def wait_for_end(self) -> None:
        """Poll until every node has ended, and check that none has failed."""
        self.wait_until(lambda: not self.is_running)
        failed = {
            name: node.process.returncode
            for name, node in self.nodes.items()
            if node.process and node.process.returncode
        }
        if failed:
            raise StuckError(f"nodes failed, with these exit codes: {failed}")

    # ---- faults

    def kill(self, name: str) -> float:
        """Kill a node with SIGKILL, keep its journal, and return the time."""
        node = self.nodes[name]
        assert node.process is not None
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
        killed_at = time.monotonic()
        committed = node.read_committed()
        uncommitted = node.read_journal().count(b"\n") - committed.count(b"\n")
        self.kills.append(Kill(name, committed, uncommitted))
        return killed_at

    def restart(self, name: str) -> float:
        """Restart a killed node and return the time."""
        self.poll()
        self.nodes[name].restart()
        return time.monotonic()

    def stop(self) -> None:
        """Let every node finish its step, commit and end."""
        for node in self.nodes.values():
            if node.process is not None:
                node.process.terminate()
        self.wait_for_end()

    # ---- observations

    def observations_of(self, name: str, after: float = 0.0) -> list[Observation]:
        """Return a node's observations after some time."""
        return [seen for seen in self.history if seen.node == name and seen.at > after]

    def has_reached(self, round: int) -> bool:
        """Return whether every node has committed the round or a later one."""
        return all(
            any(seen.event["round"] >= round for seen in self.observations_of(name))
            for name in self.nodes
        )

    def first_without(self, name: str, after: float) -> Observation | None:
        """Return the first round that a neighbour committed without this node."""
        for seen in self.history:
            if seen.at > after and name in seen.event.get("missing", ()):
                return seen
        return None

    def first_with(self, name: str, after: float) -> dict[str, Observation]:
        """Return, by neighbour, the first round in which it received from this node."""
        found: dict[str, Observation] = {}
        for seen in self.history:
            if seen.at > after and name in seen.event.get("received", ()):
                found.setdefault(seen.node, seen)
        return found

    def _progress(self) -> str:
        rounds = {
            name: seen[-1].event["round"] if (seen := self.observations_of(name)) else 0
            for name in self.nodes
        }
        return ", ".join(f"{name} is at round {round}" for name, round in rounds.items())
