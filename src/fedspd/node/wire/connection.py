"""A neighbour's connection through the TLS front: its two ends, and the bytes between them."""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedspd.core.errors import RejectedError
from fedspd.node.identity.certificates import NodeIdentity
from fedspd.node.wire.frames import FrameGuard, TokenBucket

if TYPE_CHECKING:
    from fedspd.node.wire.front import Front


class TimedTls(ssl.SSLObject):
    """TLS that says how long it takes to read.

    A record may have no data: of a caller that asks for new keys again and again, nothing else
    would be seen.
    """

    on_read: Callable[[float], None] | None = None  # with seconds of the processor

    def read(self, *about: Any) -> Any:
        """Read as TLS does."""
        started = time.thread_time()
        try:
            return super().read(*about)
        finally:
            if self.on_read is not None:
                self.on_read(time.thread_time() - started)


class Connection:
    """One admitted connection: the caller's end, gRPC's end, and the bytes between them."""

    def __init__(
        self,
        front: "Front",
        identity: NodeIdentity,
        label: str,
        host: str,
        units: TokenBucket,
        seconds: TokenBucket,
        tls: Any,
        inner: Any,
    ) -> None:
        self.front, self.identity, self.label = front, identity, label
        self.host, self.begun = host, time.monotonic()
        self.overtaken_at: float | None = None  # when the neighbour opened a newer one
        self._guard, self._units, self._seconds = FrameGuard(), units, seconds
        self._holds: set[str] = set()  # reasons not to read from the caller
        self._tls, self._inner = tls, inner  # the transports of both ends
        tls.get_extra_info("ssl_object").on_read = self._charge

    def receive(self, data: bytes) -> None:
        """Forward the caller's bytes, unless its frames are out of bounds."""
        try:
            units, calls = self._guard.feed(data)
        except RejectedError as error:
            self.front.rejections.record(self.identity.name, "frames", str(error))
            self.abort()
            return
        if calls:
            self.front.record_calls(self)
        self._wait("frames", self._units.take(units))
        self._inner.write(data)

    def _charge(self, seconds: float) -> None:
        """Count the time that TLS took for the caller's bytes."""
        self._wait("TLS", self._seconds.take(seconds))

    def _wait(self, reason: str, seconds: float) -> None:
        """Read the caller later, if it has taken too much."""
        if seconds:
            name, sentence = self.identity.name, f"it is read again in {seconds:.1f} s ({reason})."
            self.front.rejections.record(name, "rate", sentence)
            self.hold(reason)
            asyncio.get_running_loop().call_later(seconds, self.release, reason)

    def hold(self, reason: str) -> None:
        """Stop reading from the caller."""
        if not self._holds:
            self._tls.pause_reading()
        self._holds.add(reason)

    def release(self, reason: str) -> None:
        """Read from the caller again if no other reason is left."""
        self._holds.discard(reason)
        if not self._holds and not self._tls.is_closing():
            self._tls.resume_reading()

    def answer(self, data: bytes) -> None:
        """Send gRPC's bytes to the caller."""
        self._tls.write(data)

    def hold_answers(self, is_held: bool) -> None:
        """Stop or begin to read from gRPC: the caller is slow, or is no longer."""
        if not self._inner.is_closing():
            (self._inner.pause_reading if is_held else self._inner.resume_reading)()

    def end(self) -> None:
        """Close both ends, and send what is left."""
        self.front.forget(self)
        self._tls.close()
        self._inner.close()

    def abort(self) -> None:
        """Close both ends at once."""
        self.front.forget(self)
        self._tls.abort()
        self._inner.abort()


class CallerEnd(asyncio.Protocol):
    """The end of a caller, which is read once it is known to be a neighbour."""

    connection: Connection | None = None

    def connection_made(self, transport: Any) -> None:
        """Read nothing yet."""
        transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """Forward bytes."""
        if self.connection is not None:
            self.connection.receive(data)

    def pause_writing(self) -> None:
        """Let gRPC wait for a caller that reads slowly."""
        if self.connection is not None:
            self.connection.hold_answers(True)

    def resume_writing(self) -> None:
        """Let gRPC go on."""
        if self.connection is not None:
            self.connection.hold_answers(False)

    def connection_lost(self, error: Exception | None) -> None:
        """End the other side, too."""
        if self.connection is not None:
            self.connection.end()


class ServerEnd(asyncio.Protocol):
    """The end of gRPC."""

    connection: Connection | None = None

    def connection_made(self, transport: Any) -> None:
        """Read nothing before both ends are joined."""
        transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """Send an answer."""
        if self.connection is not None:
            self.connection.answer(data)

    def pause_writing(self) -> None:
        """Let the caller wait for gRPC."""
        if self.connection is not None:
            self.connection.hold("gRPC")

    def resume_writing(self) -> None:
        """Let the caller go on."""
        if self.connection is not None:
            self.connection.release("gRPC")

    def connection_lost(self, error: Exception | None) -> None:
        """End the other side, too."""
        if self.connection is not None:
            self.connection.end()
