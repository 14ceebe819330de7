"""Peers in one process, without a network: for tests. Every message is encoded and checked as on the wire."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from fedspd.core.errors import UnreachableError
from fedspd.node.identity.manifest import Manifest
from fedspd.node.wire.base import BaseTransport, Frames, Kind
from fedspd.node.wire.messages import Handler

NetworkConditions = Callable[
    [str, str, Kind], Awaitable[None]
]  # sender, receiver: may take its time, or raise UnreachableError
Network = dict[str, "MemoryTransport"]


async def fair(sender: str, receiver: str, kind: Kind) -> None:
    """Nothing is lost, and nothing is late."""


class MemoryTransport(BaseTransport):
    """The network is a dictionary that all of them share: whoever has started is in it."""

    def __init__(
        self, network: Network, manifest: Manifest, name: str, weather: NetworkConditions = fair
    ) -> None:
        super().__init__(manifest, name)
        self.network, self.weather = network, weather

    async def start(self, handler: Handler) -> None:
        self.handler = handler
        self.network[self.name] = self

    async def stop(self) -> None:
        self.network.pop(self.name, None)

    async def carry(self, neighbour: str, kind: Kind, data: bytes, limit: float) -> Frames:
        end = asyncio.get_running_loop().time() + limit
        try:
            async with asyncio.timeout_at(end):
                await self.weather(self.name, neighbour, kind)
            if neighbour not in self.network:
                raise UnreachableError(f"'{neighbour}' is not there.")
            async with aclosing(self.network[neighbour].receive(self.name, kind, data)) as answer:
                while (frame := await _before(end, answer)) is not None:
                    yield frame
        except TimeoutError:
            raise UnreachableError(
                f"'{neighbour}' did not answer within {limit:g} seconds."
            ) from None

    def client(self, neighbour: str) -> int:
        return self._told(neighbour).member(neighbour).client

    def _told(self, neighbour: str) -> Manifest:
        """A newcomer's own manifest names it, as its certificate does on the wire."""
        return self.network[neighbour].manifest if neighbour in self.network else self.manifest

    async def receive(self, sender: str, kind: Kind, data: bytes) -> Frames:
        linked = {
            *self.manifest.member(self.name).neighbours,
            *self._told(sender).member(sender).neighbours,
        }
        if not linked & {sender, self.name}:
            self.refuse(sender, "not a neighbour", f"'{sender}' and '{self.name}' have no link.")
        with self.admitted(sender, kind):
            async with aclosing(self.serve(sender, kind, data)) as answer:
                async for frame in answer:
                    yield frame


async def _before(end: float, answer: Frames) -> bytes | None:
    async with asyncio.timeout_at(end):
        return await anext(answer, None)
