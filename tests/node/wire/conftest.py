"""A network of four nodes on the ring a - b - c - d - a, over every transport."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import torch

from chaos.hosts import free_addresses
from fedspd.config import validate
from fedspd.node.host.provisioning import create
from fedspd.node.wire.grpc_transport import GrpcTransport
from fedspd.node.wire.memory import MemoryNetwork, MemoryTransport
from fedspd.node.wire.messages import Announcement, Hello, Offer, Request

NAMES = ["a", "b", "c", "d"]
CONFIG = {
    "clients": 4,
    "method": "fedspd",
    "clusters": 3,
    "topology": {"kind": "ring"},
    "model": {"name": "mlp", "hidden": 2000},
}


class Node:
    """A handler that keeps what it receives, and offers three models of consecutive numbers."""

    def __init__(self, manifest):
        self.agreement, self.received = manifest.agreement, []
        numbers = torch.arange(3 * manifest.size, dtype=getattr(torch, manifest.dtype))
        self.model_KP = numbers.reshape(3, -1)

    def handle_hello(self, sender, hello):
        self.received.append((sender, hello))
        return Hello(self.agreement, 7, "node:1")

    def handle_announcement(self, sender, announcement):
        self.received.append((sender, announcement))

    def handle_mute(self, neighbour):
        pass

    def handle_request(self, sender, request):
        self.received.append((sender, request))
        wanted = [k for k in range(3) if k in request.wants]
        return Offer(tuple(wanted), self.model_KP[wanted, : request.size])


class World:
    """The transports of one network, all of one kind, each with a Node behind it."""

    def __init__(self, kind, folder, config):
        self.kind, self.folder, self.network = kind, folder, MemoryNetwork()
        self.manifest = create(
            validate(config),
            folder,
            names=NAMES,
            addresses=dict(zip(NAMES, free_addresses(4), strict=True)),
            example=((1, 8, 8), 10),
            secure=kind != "plaintext",
        )
        self.nodes = {name: Node(self.manifest) for name in NAMES}

    def transport(self, name, manifest=None, **overrides):
        """Return the transport of a node, with some of its methods replaced."""
        manifest = manifest or self.manifest
        cls = MemoryTransport if self.kind == "memory" else GrpcTransport
        cls = type("Modified", (cls,), overrides) if overrides else cls
        if self.kind == "memory":
            return cls(self.network, manifest, name)
        bundle, is_plaintext = self.folder / "nodes" / name, self.kind == "plaintext"
        return cls(manifest, bundle, name, insecure_plaintext=is_plaintext)

    @asynccontextmanager
    async def running(self, *nodes):
        """Run nodes, given as names or as transports."""
        transports = [self.transport(node) if isinstance(node, str) else node for node in nodes]
        try:
            for transport in transports:
                handler = self.nodes.setdefault(transport.name, Node(self.manifest))
                await transport.start(handler)
            yield transports
        finally:
            for transport in transports:
                await transport.stop()

    # ---- messages

    def hello(self, round=7):
        return Hello(self.manifest.agreement, round, "10.0.0.1:7700")

    @property
    def announcement(self):
        return Announcement(3, 0, (2, 0), (10.0, 0.5), (2, 1), -5, 2)

    @property
    def request(self):
        return Request(3, 0, (2, 0), self.manifest.size)


def fixed_answer(*frames, then=None):
    """Return a `serve` that answers everything with these frames, then with `then` for ever."""

    async def serve(self, sender, method, data):
        for frame in frames:
            yield frame
        while then is not None:
            yield then

    return serve


async def eventually(call, timeout_seconds=200.0):
    """Return the result of a call that may fail at first."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return await call()
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


@pytest.fixture(params=["memory", "grpc", "plaintext"])
def world(request, tmp_path):
    return World(request.param, tmp_path / "plant", CONFIG)


@pytest.fixture
def secure(tmp_path):
    """A network over gRPC and TLS only."""
    return World("grpc", tmp_path / "plant", CONFIG)


@pytest.fixture
def tools():
    """The functions and classes of this file, for the tests beside it."""
    return {
        "fixed_answer": fixed_answer,
        "eventually": eventually,
        "World": World,
        "CONFIG": CONFIG,
    }
