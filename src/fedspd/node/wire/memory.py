"""The transport of peers in one process, without sockets, for tests.

Every message is encoded and validated as on the wire. `conditions` decide how messages travel:
they may wait, to delay a message, or raise UnreachableError, to lose it.

    async def slow_link(sender: str, receiver: str, method: RpcMethod) -> None:
        if {sender, receiver} == {"n0", "n1"}:
            await asyncio.sleep(0.1)

    digests = fedspd.testing.run_peers(plan, graph, rounds, MemoryNetwork(slow_link))
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from fedspd.core.errors import RefusedError, UnreachableError
from fedspd.node.identity.manifest import Manifest
from fedspd.node.wire.base import BaseTransport, FrameStream, RpcMethod
from fedspd.node.wire.messages import Handler

NetworkConditions = Callable[[str, str, RpcMethod], Awaitable[None]]  # sender, receiver, method


async def ideal_conditions(sender: str, receiver: str, method: RpcMethod) -> None:
    """Deliver every message at once."""


class MemoryNetwork:
    """The nodes of one process by name, and the conditions under which their messages travel."""

    def __init__(self, conditions: NetworkConditions = ideal_conditions) -> None:
        self.conditions = conditions  # a test may change them at any time
        self.nodes: dict[str, MemoryTransport] = {}  # that have started

    def transport(self, manifest: Manifest, name: str) -> "MemoryTransport":
        """Return the transport of a node, which others can reach once it has started."""
        return MemoryTransport(self, manifest, name)

    def disconnect(self, name: str) -> None:
        """Remove a node without telling the others, as a crash does."""
        self.nodes.pop(name, None)


class MemoryTransport(BaseTransport):
    """The transport of one node of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, manifest: Manifest, name: str) -> None:
        super().__init__(manifest, name)
        self.network = network

    async def start(self, handler: Handler) -> None:
        """Receive messages for the handler."""
        self.handler = handler
        self.network.nodes[self.name] = self

    async def stop(self) -> None:
        """Leave the network."""
        self.network.disconnect(self.name)

    async def send(
        self, neighbour: str, method: RpcMethod, data: bytes, timeout_seconds: float
    ) -> FrameStream:
        """Send an encoded message and yield the frames of the answer."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        try:
            async with asyncio.timeout_at(deadline):
                await self.network.conditions(self.name, neighbour, method)
            if neighbour not in self.network.nodes:
                raise RefusedError(f"'{neighbour}' has not started, or has stopped.")
            receiver = self.network.nodes[neighbour]
            async with aclosing(receiver.receive(self.name, method, data)) as frames:
                while (frame := await _next_before(deadline, frames)) is not None:
                    yield frame
        except TimeoutError:
            raise UnreachableError(
                f"'{neighbour}' did not answer within {timeout_seconds:g} seconds."
            ) from None

    async def receive(self, sender: str, method: RpcMethod, data: bytes) -> FrameStream:
        """Yield the frames of this node's answer to a message."""
        linked = {
            *self.manifest.member(self.name).neighbours,
            *self._manifest_of(sender).member(sender).neighbours,
        }
        if not linked & {sender, self.name}:
            self.reject(sender, "not a neighbour", f"'{sender}' and '{self.name}' have no link.")
        with self.admit(sender, method):
            async with aclosing(self.serve(sender, method, data)) as frames:
                async for frame in frames:
                    yield frame

    def client_of(self, neighbour: str) -> int:
        """Return the neighbour's client number."""
        return self._manifest_of(neighbour).member(neighbour).client

    def _manifest_of(self, neighbour: str) -> Manifest:
        """Return the neighbour's own manifest, which names a newcomer as its certificate does."""
        nodes = self.network.nodes
        return nodes[neighbour].manifest if neighbour in nodes else self.manifest


async def _next_before(deadline: float, frames: FrameStream) -> bytes | None:
    async with asyncio.timeout_at(deadline):
        return await anext(frames, None)
