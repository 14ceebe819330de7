"""A TCP relay in front of every node: it counts the bytes, and can delay, stall and cut what passes.

A kernel without netem cannot do that; and what is counted here is what a socket carries, TLS and all, without the
headers of TCP.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from chaos.hosts import Machine, inside

CHUNK = 16_384  # bytes that are treated as one
WAITING = 64  # chunks of one direction that may be under way
NO_LINGER = struct.pack("ii", 1, 0)  # a socket that is closed so says RST
START = 10.0  # seconds
Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


@dataclass(frozen=True)
class NetworkConditions:
    delay: float = 0.0  # seconds that every chunk needs, give or take a fifth
    stalled: float = 0.0  # the share of chunks that stand still for a second,
    reset: float = 0.0  # and of those at which the connection is reset


class Reset(Exception):
    """Of a connection, by the weather."""


class Relay:
    """Runs in a thread of its own; `weather` may be changed at any time."""

    def __init__(
        self, machines: Sequence[Machine], weather: NetworkConditions | None = None, seed: int = 0
    ) -> None:
        self.machines, self.weather = machines, weather or NetworkConditions()
        self.bytes = 0  # that arrived, of both directions of all connections
        self.resets = 0
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> "Relay":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(START)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _listen(self) -> None:
        self._servers = []
        for machine in self.machines:
            with inside(machine.space):
                listener = socket.create_server(_place(machine.address))
            self._servers.append(
                await asyncio.start_server(self._connecting(machine), sock=listener)
            )

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connecting(self, machine: Machine) -> Connected:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._connection(machine, reader, writer)
            writer.close()

        return connected

    async def _connection(
        self, machine: Machine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with inside(machine.space):
            onward = socket.socket()
        onward.setblocking(False)
        try:
            await self._loop.sock_connect(onward, _place(machine.listen))
        except OSError:
            onward.close()
            raise
        behind = await asyncio.open_connection(sock=onward)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._direction(reader, behind[1]))
                both.create_task(self._direction(behind[0], writer))
        except* Reset:
            self.resets += 1
            for each in (writer, behind[1]):
                _reset(each)
        except* ConnectionError:
            pass  # one side has ended it
        finally:
            behind[1].close()

    async def _direction(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Order is kept: whatever comes behind a stalled chunk waits for it."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(WAITING)
        async with asyncio.TaskGroup() as two:
            two.create_task(self._deliver(under_way, writer))
            while chunk := await reader.read(CHUNK):
                self.bytes += len(chunk)
                await under_way.put((self._loop.time() + self._seconds(), chunk))
            await under_way.put((0.0, b""))
        raise ConnectionAbortedError  # so that the other direction ends too

    async def _deliver(
        self, under_way: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due, chunk = await under_way.get()
            if not chunk:
                return
            await asyncio.sleep(due - self._loop.time())
            if self._random.random() < self.weather.reset:
                raise Reset
            writer.write(chunk)
            await writer.drain()

    def _seconds(self) -> float:
        stall = 1.0 if self._random.random() < self.weather.stalled else 0.0
        return self.weather.delay * self._random.uniform(0.8, 1.2) + stall


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _reset(writer: asyncio.StreamWriter) -> None:
    carrier = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        carrier.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.transport.abort()
