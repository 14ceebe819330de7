"""An in-memory network that loses, doubles and delays messages, and crashes within a commit."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chaos.insiders import InsiderNetwork, InsiderTransport, Lie
from fedspd.core.errors import RejectedError, UnreachableError
from fedspd.node.identity.manifest import Manifest
from fedspd.node.wire.base import FrameStream, RpcMethod
from fedspd.node.wire.memory import MemoryTransport
from fedspd.storage.run_folder import RunFolder


class CrashError(Exception):
    """The end of a process in the middle of a commit."""


def crash_next_commit(folder: RunFolder, at: str) -> None:
    """Let the next commit end before its event, within it, after it, or after the checkpoint."""
    append, checkpoint = folder.append, folder.checkpoint

    def append_in_part(event: Any, is_sealed: bool = False) -> None:
        if at != "before the event":
            append(event, is_sealed)
        if at == "within the event":
            path = folder.folder / "events.jsonl"
            os.truncate(path, path.stat().st_size - 9)
        if at != "after the checkpoint":
            raise CrashError

    @contextmanager
    def complete(*about: Any) -> Iterator[Path]:
        with checkpoint(*about) as path:
            yield path
        raise CrashError

    folder.append = append_in_part  # type: ignore[method-assign]
    folder.checkpoint = complete  # type: ignore[assignment, method-assign]


MOMENTS = ["before the event", "within the event", "after the event", "after the checkpoint"]


class FaultyNetwork(InsiderNetwork):
    """A network that loses, doubles and delays messages, by link."""

    def __init__(self, liar: str, lie: Lie, travel_seconds: float) -> None:
        super().__init__({liar: lie}, self.travel)
        self.travel_seconds = travel_seconds
        self.lost: set[tuple[str, str]] = set()
        self.doubled: set[tuple[str, str]] = set()
        self.delay_seconds: dict[tuple[str, str], float] = {}

    async def travel(self, sender: str, receiver: str, method: RpcMethod) -> None:
        """Lose or delay a message."""
        if (sender, receiver) in self.lost:
            raise UnreachableError("lost.")
        await asyncio.sleep(self.delay_seconds.get((sender, receiver), self.travel_seconds))

    def transport(self, manifest: Manifest, name: str) -> MemoryTransport:
        """Return the transport of a node."""
        if name in self.lies:
            return DoublingInsider(self, manifest, name, self.lies[name])
        return DoublingTransport(self, manifest, name)


class Doubling(MemoryTransport):
    """A transport whose messages may arrive twice."""

    async def receive(self, sender: str, method: RpcMethod, data: bytes) -> FrameStream:
        """Answer a message, perhaps twice."""
        assert isinstance(self.network, FaultyNetwork)
        if (sender, self.name) in self.network.doubled:
            try:
                async for _ in super().receive(sender, method, data):
                    pass
            except (RejectedError, UnreachableError):
                pass
        async for frame in super().receive(sender, method, data):
            yield frame


class DoublingTransport(Doubling):
    """The transport of an honest node."""


class DoublingInsider(Doubling, InsiderTransport):
    """The transport of an insider."""
