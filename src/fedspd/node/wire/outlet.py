"""The way out of a node: the bytes that a neighbour may send to its caller are bounded.

gRPC's client reads whatever a server sends, asked or not: a flood of frames costs its caller
memory and processor time. Therefore gRPC calls a neighbour through a Unix socket of the node, which
forwards the encrypted bytes. It counts those that come back, and closes the connection of a
neighbour that sends more than it was asked for. TLS stays between gRPC and the neighbour.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedspd.node.wire.frames import TokenBucket

CALL_BYTES = 16 * 1024  # of an answer, apart from models: headers, settings, a handshake
OVERHEAD_RATIO = 1.05  # of frames and TLS, on models
# For pings and for what is under way when a call is given up.
SLACK_BYTES, SLACK_BYTES_PER_SECOND = 4 * 2**20, 256 * 1024
SocketAddress = tuple[int, tuple[Any, ...]]  # family and address


class Allowance:
    """The bytes that a neighbour may send: what it was asked for, and a little more with time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._expected = self._left = 0.0  # bytes of the calls in progress
        self._slack = TokenBucket(SLACK_BYTES, SLACK_BYTES_PER_SECOND, clock)

    @contextmanager
    def expecting(self, count: int) -> Iterator[None]:
        """Allow an answer of so many bytes while a call lasts; what is left over is lost."""
        granted = CALL_BYTES + OVERHEAD_RATIO * count
        self._expected += granted
        self._left += granted
        try:
            yield
        finally:
            self._expected -= granted
            self._left = min(self._left, self._expected)

    def take(self, count: int) -> bool:
        """Count bytes; return whether they are within the allowance."""
        paid = min(self._left, count)
        self._left -= paid
        return self._slack.take(count - paid) == 0


class Outlet:
    """The Unix socket through which gRPC calls one neighbour."""

    def __init__(self, path: Path, address: str, on_flood: Callable[[], None]) -> None:
        """Forward connections at `path` to an address; call `on_flood` for one that is cut off."""
        self.path, self.address, self.on_flood = path, address, on_flood
        self.allowance = Allowance()
        self.refusal: str | None = None  # why nobody can answer at the address
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[GrpcEnd] = set()
        self._server: asyncio.Server | None = None
        self._lookup: asyncio.Future[list[SocketAddress]] | None = None
        self._turn = 0  # which of the neighbour's addresses is tried first

    @property
    def target(self) -> str:
        """The address that gRPC must call."""
        return f"unix:{self.path}"

    async def open(self) -> None:
        """Wait for gRPC."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: GrpcEnd(self), str(self.path))

    def close(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for end in list(self._ends):
            end.abort()

    def join(self, end: "GrpcEnd") -> None:
        """Connect gRPC with the neighbour."""
        self._ends.add(end)
        task = end.connecting = asyncio.create_task(self._connect(end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, end: "GrpcEnd") -> None:
        """Take note that a connection has ended."""
        self._ends.discard(end)

    async def _connect(self, end: "GrpcEnd") -> None:
        try:
            connected = await self._open_socket()
        except OSError as error:
            self.refusal = _describe_refusal(error)
            end.abort()
            return
        except asyncio.CancelledError:  # gRPC gave up: the next attempt is at another address
            self._turn += 1
            raise
        self.refusal, loop = None, asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: NeighbourEnd(end), sock=connected)
        end.begin(transport)

    async def _open_socket(self) -> socket.socket:
        """Return a connection to the neighbour, at the first of its addresses that accepts."""
        addresses, are_refusals = await self._resolve(), []
        for _ in addresses:
            try:
                return await _connected(*addresses[self._turn % len(addresses)])
            except OSError as error:
                self._turn += 1
                are_refusals.append(isinstance(error, ConnectionRefusedError))
        raise ConnectionRefusedError if all(are_refusals) else ConnectionError

    async def _resolve(self) -> list[SocketAddress]:
        """Return the addresses of the neighbour's name.

        A name server may be silent for long. So a name has a thread of its own, at most one at a
        time, which does not keep the node from training or from ending.
        """
        if self._lookup is None or self._lookup.done():
            self._lookup = asyncio.get_running_loop().create_future()
            work = (self.address, self._lookup)
            threading.Thread(target=_look_up, args=work, daemon=True).start()
        return await asyncio.shield(self._lookup)


class GrpcEnd(asyncio.Protocol):
    """gRPC's end of a connection to a neighbour."""

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet
        self.connecting: asyncio.Task[None] | None = None
        self._inner: Any = None  # the transports of both ends
        self._outer: Any = None

    def connection_made(self, transport: Any) -> None:
        """Read nothing before both ends are joined."""
        self._inner = transport
        transport.pause_reading()
        self.outlet.join(self)

    def begin(self, outer: Any) -> None:
        """Forward bytes from now on."""
        self._outer = outer
        if self._inner.is_closing():
            self.abort()
        else:
            self._inner.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Send a call."""
        self._outer.write(data)

    def answer(self, data: bytes) -> None:
        """Forward the neighbour's bytes, unless there are too many of them."""
        if self.outlet.allowance.take(len(data)):
            self._inner.write(data)
        else:
            self.abort()
            self.outlet.on_flood()

    def pause_writing(self) -> None:
        """Let the neighbour wait for gRPC."""
        if self._outer is not None and not self._outer.is_closing():
            self._outer.pause_reading()

    def resume_writing(self) -> None:
        """Let the neighbour go on."""
        if self._outer is not None and not self._outer.is_closing():
            self._outer.resume_reading()

    def hold_calls(self, is_held: bool) -> None:
        """Stop or begin to read from gRPC: the neighbour is slow, or is no longer."""
        if not self._inner.is_closing():
            (self._inner.pause_reading if is_held else self._inner.resume_reading)()

    def connection_lost(self, error: Exception | None) -> None:
        """End the other side, too."""
        if self._outer is not None:
            self._outer.close()
        elif self.connecting is not None:
            self.connecting.cancel()
        self.outlet.forget(self)

    def end(self) -> None:
        """Close gRPC's side after all that came has been forwarded."""
        self._inner.close()

    def abort(self) -> None:
        """Close both ends at once."""
        self._inner.abort()
        if self._outer is not None:
            self._outer.abort()


class NeighbourEnd(asyncio.Protocol):
    """The neighbour's end of a connection."""

    def __init__(self, end: GrpcEnd) -> None:
        self._end = end

    def data_received(self, data: bytes) -> None:
        """Forward an answer."""
        self._end.answer(data)

    def pause_writing(self) -> None:
        """Let gRPC wait for a neighbour that reads slowly."""
        self._end.hold_calls(True)

    def resume_writing(self) -> None:
        """Let gRPC go on."""
        self._end.hold_calls(False)

    def connection_lost(self, error: Exception | None) -> None:
        """End the other side, too."""
        self._end.end()


async def _connected(family: int, address: tuple[Any, ...]) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setblocking(False)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(found, address)
    except BaseException:
        found.close()
        raise
    return found


def _describe_refusal(error: OSError) -> str | None:
    """Return why nobody can answer; None if the neighbour may just be slow, or cut off."""
    if isinstance(error, socket.gaierror):
        return "its name does not resolve"
    return "connection refused" if isinstance(error, ConnectionRefusedError) else None


def _look_up(address: str, found: "asyncio.Future[list[SocketAddress]]") -> None:
    host, _, port = address.rpartition(":")
    result: list[SocketAddress] | OSError
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        result = [(family, sockaddr) for family, _, _, _, sockaddr in dict.fromkeys(infos)]
    except OSError as error:
        result = error
    with suppress(RuntimeError):  # the node has ended
        found.get_loop().call_soon_threadsafe(_set, found, result)


def _set(found: "asyncio.Future[list[SocketAddress]]", result: Any) -> None:
    if isinstance(result, OSError):
        found.set_exception(result)
        found.exception()  # nobody may be waiting any more
    else:
        found.set_result(result)
