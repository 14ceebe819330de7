"""Machines that are network namespaces: two switches with a cable between them, and one half of the nodes at each.

    0 1 2 3 --- left ===cable=== right --- 4 5 6 7

Every node has one address, where its relay listens (relay.py); the node itself listens on the loopback of its namespace.
Nothing outside these namespaces is touched.
"""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET
RELAYED, BEHIND = 7700, 7701  # ports
NUMBER = count()


@dataclass(frozen=True)
class Machine:
    space: str | None  # a network namespace; None: this one
    address: str  # where neighbours call
    listen: str  # where the node listens


class Hosts:
    def __init__(self, nodes: int) -> None:
        mark = f"fedspd-{os.getpid()}-{next(NUMBER)}"
        self.hub = f"{mark}-hub"
        self.machines = [
            Machine(f"{mark}-{i}", f"10.77.0.{i + 1}:{RELAYED}", f"127.0.0.1:{BEHIND}")
            for i in range(nodes)
        ]

    def __enter__(self) -> "Hosts":
        try:
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for space in (self.hub, *(machine.space for machine in self.machines)):
            subprocess.run(["ip", "netns", "delete", str(space)], capture_output=True, check=False)

    def _connect(self) -> None:
        ip("netns", "add", self.hub)
        for switch in ("left", "right"):
            ip("-n", self.hub, "link", "add", switch, "type", "bridge")
            ip("-n", self.hub, "link", "set", switch, "up")
        ip("-n", self.hub, "link", "add", "cable", "type", "veth", "peer", "name", "elbac")
        self._plug("cable", "left")
        self._plug("elbac", "right")
        for i in range(len(self.machines)):
            self._add(i, "left" if 2 * i < len(self.machines) else "right")

    def _add(self, i: int, switch: str) -> None:
        space, address = str(self.machines[i].space), self.machines[i].address.partition(":")[0]
        ip("netns", "add", space)
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            space,
            "type",
            "veth",
            "peer",
            "name",
            f"port{i}",
            "netns",
            self.hub,
        )
        ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", space, "link", "set", device, "up")
        self._plug(f"port{i}", switch)

    def _plug(self, device: str, switch: str) -> None:
        ip("-n", self.hub, "link", "set", device, "master", switch, "up")

    def cable(self, state: str) -> None:
        """`down` parts the two halves, `up` joins them."""
        ip("-n", self.hub, "link", "set", "cable", state)

    def narrow(self, i: int, rate: str) -> None:
        """Both directions of a node's link."""
        for space, device in ((str(self.machines[i].space), "eth0"), (self.hub, f"port{i}")):
            shape = [
                "tc",
                "qdisc",
                "add",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "16kb",
                "latency",
                "500ms",
            ]
            _call(["ip", "netns", "exec", space, *shape])


def ip(*words: str) -> None:
    _call(["ip", *words])


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def why_not() -> str | None:
    """Why namespaces cannot be had here; None where they can."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"no command '{missing[0]}'"
    try:
        with Hosts(2) as hosts:
            hosts.narrow(0, "1mbit")
    except OSError as error:
        return str(error)
    return None


def local(nodes: int) -> list[Machine]:
    """Without namespaces: ports of this machine that are free now."""
    with ExitStack() as held:  # all at once, so that no two are the same
        drawn = [
            held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2 * nodes)
        ]
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in drawn]
    return [Machine(None, *pair) for pair in zip(addresses[:nodes], addresses[nodes:], strict=True)]


@contextmanager
def inside(space: str | None) -> Iterator[None]:
    """Sockets that this thread makes are of another machine; a socket stays where it was made."""
    if space is None:
        yield
        return
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    away = os.open(f"/run/netns/{space}", os.O_RDONLY)
    try:
        _enter(away)
        yield
    finally:
        _enter(home)
        os.close(home)
        os.close(away)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, NETWORK_NAMESPACE):
        raise OSError(ctypes.get_errno(), "setns")
