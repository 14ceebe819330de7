"""A network of four on a ring: a has the neighbours b and d, and c is none of its. Over whatever carries the bytes."""

import asyncio
import socket
import time
from contextlib import asynccontextmanager

import pytest
import torch

from fedspd.config import validate
from fedspd.node.host.provisioning import create
from fedspd.node.wire.grpc_transport import GrpcTransport
from fedspd.node.wire.memory import MemoryTransport
from fedspd.node.wire.messages import Announcement, Hello, Offer, Request

NAMES = ["a", "b", "c", "d"]
CONFIG = {
    "clients": 4,
    "clusters": 3,
    "topology": {"kind": "ring"},
    "model": {"name": "mlp", "hidden": 2000},
}


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Node:
    """A handler that remembers what it was told, and offers three models of consecutive numbers."""

    def __init__(self, manifest):
        self.agreement, self.heard = manifest.agreement, []
        self.model_KP = torch.arange(
            3 * manifest.size, dtype=getattr(torch, manifest.dtype)
        ).reshape(3, -1)

    def hello(self, sender, said):
        self.heard.append((sender, said))
        return Hello(self.agreement, 7, "node:1")

    def announced(self, sender, announcement):
        self.heard.append((sender, announcement))

    def offered(self, sender, request):
        self.heard.append((sender, request))
        wanted = [k for k in range(3) if k in request.wants]
        return Offer(tuple(wanted), self.model_KP[wanted, : request.size])


class World:
    """Transports of one kind between the nodes of one network, each with a Node behind it."""

    def __init__(self, kind, folder, config):
        self.kind, self.folder, self.network = kind, folder, {}
        addresses = {
            name: f"127.0.0.1:{port}" for name, port in zip(NAMES, free_ports(4), strict=True)
        }
        self.manifest = create(
            validate(config),
            folder,
            names=NAMES,
            addresses=addresses,
            example=((1, 8, 8), 10),
            secure=kind != "plaintext",
        )
        self.nodes = {name: Node(self.manifest) for name in NAMES}

    def make(self, name, manifest=None, **overrides):
        """A transport; with overrides, one that does some things otherwise."""
        manifest = manifest or self.manifest
        cls = MemoryTransport if self.kind == "memory" else GrpcTransport
        cls = type("Odd", (cls,), overrides) if overrides else cls
        if self.kind == "memory":
            return cls(self.network, manifest, name)
        return cls(
            manifest,
            self.folder / "nodes" / name,
            name,
            insecure_plaintext=self.kind == "plaintext",
        )

    @asynccontextmanager
    async def running(self, *transports):
        """Names, or transports."""
        made = [self.make(each) if isinstance(each, str) else each for each in transports]
        try:
            for each in made:
                await each.start(self.nodes.setdefault(each.name, Node(self.manifest)))
            yield made
        finally:
            for each in made:
                await each.stop()

    # ---- what is said

    def said(self, round=7):
        return Hello(self.manifest.agreement, round, "10.0.0.1:7700")

    @property
    def announcement(self):
        return Announcement(3, 0, (2, 0), (10.0, 0.5), (2, 1), -5, 2)

    @property
    def request(self):
        return Request(3, 0, (2, 0), self.manifest.size)


def lying(*frames, then=None):
    """A `serve` that answers with these frames, whatever it is asked; then with an endless one, if there is one."""

    async def serve(self, sender, kind, data):
        for frame in frames:
            yield frame
        while then is not None:
            yield then

    return serve


async def eventually(call, limit=20.0):
    """The result of a call that may fail at first."""
    end = time.monotonic() + limit
    while True:
        try:
            return await call()
        except Exception:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.05)


@pytest.fixture(params=["memory", "grpc", "plaintext"])
def world(request, tmp_path):
    return World(request.param, tmp_path / "plant", CONFIG)


@pytest.fixture
def secure(tmp_path):
    """Over gRPC and TLS only."""
    return World("grpc", tmp_path / "plant", CONFIG)


@pytest.fixture
def tools():
    """Functions for the tests of this folder."""
    return {
        "lying": lying,
        "eventually": eventually,
        "free_ports": free_ports,
        "World": World,
        "CONFIG": CONFIG,
    }
