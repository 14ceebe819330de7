"""Hosts as network namespaces: two switches, a cable between them, and half of the nodes at each.

    0 1 2 3 --- left ===cable=== right --- 4 5 6 7

The relay of a node (relay.py) listens at the host's address; the node listens on the loopback of
the namespace. Nothing outside these namespaces changes.
"""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

CLONE_NEWNET = 0x40000000
RELAY_PORT, NODE_PORT = 7700, 7701
NETWORK_NUMBERS, PORT_NUMBERS = count(), count()
PORTS_PER_PROCESS = 200


@dataclass(frozen=True)
class Host:
    """Where a node runs."""

    namespace: str | None  # None for the namespace of this process
    address: str  # where neighbours call: the relay
    listen: str  # where the node listens


class NamespaceNetwork:
    """A context in which every node has a network namespace as its host."""

    def __init__(self, nodes: int) -> None:
        prefix = f"fedspd-{os.getpid()}-{next(NETWORK_NUMBERS)}"
        self.hub = f"{prefix}-hub"
        self.namespaces = [f"{prefix}-{i}" for i in range(nodes)]
        self.hosts = [
            Host(namespace, f"10.77.0.{i + 1}:{RELAY_PORT}", f"127.0.0.1:{NODE_PORT}")
            for i, namespace in enumerate(self.namespaces)
        ]

    def __enter__(self) -> "NamespaceNetwork":
        try:
            self._create()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for namespace in (self.hub, *self.namespaces):
            command = ["ip", "netns", "delete", namespace]
            subprocess.run(command, capture_output=True, check=False)

    def _create(self) -> None:
        _run(f"ip netns add {self.hub}")
        for switch in ("left", "right"):
            _run(f"ip -n {self.hub} link add {switch} type bridge")
            _run(f"ip -n {self.hub} link set {switch} up")
        _run(f"ip -n {self.hub} link add cable type veth peer name elbac")
        self._plug("cable", "left")
        self._plug("elbac", "right")
        for i in range(len(self.hosts)):
            self._add_host(i, "left" if 2 * i < len(self.hosts) else "right")

    def _add_host(self, i: int, switch: str) -> None:
        namespace, address = self.namespaces[i], self.hosts[i].address.partition(":")[0]
        _run(f"ip netns add {namespace}")
        peer = f"peer name port{i} netns {self.hub}"
        _run(f"ip link add eth0 netns {namespace} type veth {peer}")
        _run(f"ip -n {namespace} address add {address}/24 dev eth0")
        for device in ("lo", "eth0"):
            _run(f"ip -n {namespace} link set {device} up")
        self._plug(f"port{i}", switch)

    def _plug(self, device: str, switch: str) -> None:
        _run(f"ip -n {self.hub} link set {device} master {switch} up")

    def set_cable(self, state: Literal["up", "down"]) -> None:
        """Join or separate the two halves of the network."""
        _run(f"ip -n {self.hub} link set cable {state}")

    def limit_rate(self, i: int, rate: str) -> None:
        """Limit both directions of a host's link."""
        for namespace, device in ((self.namespaces[i], "eth0"), (self.hub, f"port{i}")):
            shape = f"tbf rate {rate} burst 16kb latency 500ms"
            _run(f"ip netns exec {namespace} tc qdisc add dev {device} root {shape}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")


def missing_requirement() -> str | None:
    """Return why network namespaces cannot be used here, or None if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no command '{tool}'"
    try:
        with NamespaceNetwork(2) as network:
            network.limit_rate(0, "1mbit")
    except OSError as error:
        return str(error)
    return None


def local_hosts(nodes: int) -> list[Host]:
    """Return hosts without namespaces, at free addresses of this machine."""
    addresses = free_addresses(2 * nodes)
    return [Host(None, *pair) for pair in zip(addresses[:nodes], addresses[nodes:], strict=True)]


def free_addresses(wanted: int) -> list[str]:
    """Return addresses of this machine at which nobody listens.

    Their ports are not among those of outgoing connections, and processes draw from different ones:
    none is taken between now and its use.
    """
    first, addresses = 10_000 + os.getpid() % 100 * PORTS_PER_PROCESS, list[str]()
    while len(addresses) < wanted:
        place = ("127.0.0.1", first + next(PORT_NUMBERS) % PORTS_PER_PROCESS)
        with suppress(OSError), socket.create_server(place):
            addresses.append("{}:{}".format(*place))
    return addresses


@contextmanager
def in_namespace(namespace: str | None) -> Iterator[None]:
    """Open the sockets of this thread in a namespace; a socket stays where it was opened."""
    if namespace is None:
        yield
        return
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    away = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _enter_namespace(away)
        yield
    finally:
        _enter_namespace(home)
        os.close(home)
        os.close(away)


def _enter_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
