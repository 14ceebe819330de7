"""A TCP relay in front of every node: it counts bytes, and delays, stalls and resets connections.

It replaces netem, which not every kernel has. It counts the payload of TCP, TLS included.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from chaos.hosts import Host, in_namespace

CHUNK_BYTES = 16_384  # at most, that are delayed as one
MAX_QUEUED = 64  # chunks of one direction
NO_LINGER = struct.pack("ii", 1, 0)  # a socket with this option sends RST when it is closed
START_TIMEOUT_SECONDS = 10.0
Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]
Queue = asyncio.Queue[tuple[float, bytes]]  # when each chunk is due, and the chunk


@dataclass(frozen=True)
class LinkConditions:
    """How a relay treats the chunks that pass."""

    delay: float = 0.0  # seconds of every chunk, plus or minus 20 %
    stalled: float = 0.0  # the share of chunks that take a second longer
    reset: float = 0.0  # the share of chunks that reset their connection
    cut: tuple[str, str] | None = None  # the caller's IP address, and the address it cannot reach


class InjectedResetError(Exception):
    """A connection that the relay resets."""


class Relay:
    """The relays of all hosts, in one thread; a test may change `conditions` at any time."""

    def __init__(
        self, hosts: Sequence[Host], conditions: LinkConditions | None = None, seed: int = 0
    ) -> None:
        self.hosts, self.conditions = hosts, conditions or LinkConditions()
        self.bytes = 0  # received, in both directions of all connections
        self.resets = 0
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> "Relay":
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
        started.result(START_TIMEOUT_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        closed = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        closed.result(START_TIMEOUT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _listen(self) -> None:
        for host in self.hosts:
            with in_namespace(host.namespace):
                listener = socket.create_server(_split_address(host.address))
            server = await asyncio.start_server(self._connection_handler(host), sock=listener)
            self._servers.append(server)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connection_handler(self, host: Host) -> Connected:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._forward(host, reader, writer)
            writer.close()

        return handle

    async def _forward(
        self, host: Host, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward both directions of a connection until one side or a reset ends it."""
        caller = writer.get_extra_info("peername")[0]
        if self.conditions.cut == (caller, host.address):
            return
        node_reader, node_writer = await self._connect(host)
        try:
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._forward_direction(reader, node_writer))
                directions.create_task(self._forward_direction(node_reader, writer))
        except* InjectedResetError:
            self.resets += 1
            _reset(writer)
            _reset(node_writer)
        except* ConnectionError:
            pass  # one side has closed it
        finally:
            node_writer.close()

    async def _connect(self, host: Host) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        with in_namespace(host.namespace):
            onward = socket.socket()
        onward.setblocking(False)
        try:
            await self._loop.sock_connect(onward, _split_address(host.listen))
        except OSError:
            onward.close()
            raise
        return await asyncio.open_connection(sock=onward)

    async def _forward_direction(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward chunks in order: those behind a stalled chunk wait for it."""
        queue: Queue = asyncio.Queue(MAX_QUEUED)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deliver(queue, writer))
            while chunk := await reader.read(CHUNK_BYTES):
                self.bytes += len(chunk)
                await queue.put((self._loop.time() + self._draw_delay(), chunk))
            await queue.put((0.0, b""))
        raise ConnectionAbortedError  # so that the other direction ends, too

    async def _deliver(self, queue: Queue, writer: asyncio.StreamWriter) -> None:
        while True:
            due, chunk = await queue.get()
            if not chunk:
                return
            await asyncio.sleep(due - self._loop.time())
            if self._random.random() < self.conditions.reset:
                raise InjectedResetError
            writer.write(chunk)
            await writer.drain()

    def _draw_delay(self) -> float:
        stall = 1.0 if self._random.random() < self.conditions.stalled else 0.0
        return self.conditions.delay * self._random.uniform(0.8, 1.2) + stall


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.transport.abort()
