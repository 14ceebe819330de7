"""The TLS front of a node: it admits neighbours alone and bounds what each of them can take.

gRPC's server does not say who failed at a handshake, accepts revoked certificates, and reads
headers that never end. Therefore a node itself terminates mutual TLS 1.3, and forwards the bytes
of its neighbours to gRPC's Unix socket, in a folder that only its user can open. The name of the
front's end of such a connection tells gRPC which neighbour calls: it is random, and known to this
process alone.

Places for neighbours are separate from those for handshakes, so strangers cannot take them. A
caller must give a TLS host name of the network, which contains the network's random identifier.
Strangers do not know it, so their attempts end before any costly step, and do not count against
the handshakes of a neighbour that shares their address.
"""

import asyncio
import ipaddress
import logging
import os
import secrets
import socket
import ssl
import sys
import time
from collections import Counter, deque
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedspd.core.errors import RejectedError, UnreachableError
from fedspd.node.identity.certificates import NodeIdentity
from fedspd.node.wire.connection import CallerEnd, Connection, ServerEnd, TimedTls
from fedspd.node.wire.frames import TokenBucket
from fedspd.node.wire.misbehaviour import LOG_INTERVAL_SECONDS, RejectionLog

log = logging.getLogger("fedspd.node")

HANDSHAKE_SECONDS = 5.0
CLOSE_SECONDS = 1.0  # for the caller to agree that a connection ends
CHECK_SECONDS = 1.0  # between two looks at the certificates of open connections
RETRY_SECONDS = 0.1  # after the system had no descriptor left
BACKLOG = 512
MAX_DESCRIPTORS = 65_536  # files and connections to ask the system for
MAX_PENDING = 128  # handshakes at a time
MAX_PENDING_PER_HOST = 32
MAX_CONNECTIONS = 4  # of one neighbour: it uses one, and a crash may leave another
MAX_ENDED = 1024  # connections that are remembered after their end
MAX_HOSTS = 1024  # whose handshakes and failures are remembered
FAILURES, FAILURES_PER_SECOND = 20, 2.0  # handshakes that one address may fail
HANDSHAKES, HANDSHAKES_PER_SECOND = 200, 20.0  # that name the network, from one address
CLONE_SECONDS = 5.0  # a connection that calls so long after a newer one began: two processes
UNITS, UNITS_PER_SECOND = 20_000, 4_000.0  # frames of one neighbour; a call costs CALL_UNITS
TLS_SECONDS, TLS_SECONDS_PER_SECOND = 0.1, 0.1  # of the processor, to decrypt what it sends


class Gatekeeper(Protocol):
    """The part of a node that knows its neighbours."""

    def authenticate(self, certificate: bytes) -> NodeIdentity:
        """Return the identity in a PEM certificate, or raise RejectedError."""
        ...

    def check(self, identity: NodeIdentity) -> None:
        """Raise RejectedError if an identity is no longer valid."""
        ...


@dataclass
class Attempt:
    """A handshake in progress."""

    host: str
    is_named: bool = False  # whether the caller knows the network's name
    is_excessive: bool = False  # whether its host made too many of those before


# asyncio's callbacks of a connection run in the context of the task that accepted it.
_attempt: ContextVar[Attempt] = ContextVar("attempt")


class Front:
    """The listener of a node, in front of gRPC's Unix socket."""

    def __init__(
        self,
        context: ssl.SSLContext,
        gatekeeper: Gatekeeper,
        rejections: RejectionLog,
        addresses: Mapping[str, str],
        folder: Path,
        domain: str,
    ) -> None:
        """Admit the callers whom the gatekeeper knows; `addresses` are those of the neighbours.

        The sockets are made in the folder, which must be empty and private. A caller
        must expect a host of the domain, which only the network's nodes know.
        """
        self.gatekeeper, self.rejections = gatekeeper, rejections
        self._context, self._domain = context, domain
        context.sni_callback, context.sslobject_class = self._check_name, TimedTls
        self._folder = folder
        self._listeners: list[socket.socket] = []
        self._max_pending = min(MAX_PENDING, max_descriptors() // 8)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[asyncio.Task[None], Attempt] = {}  # oldest first
        self._failures: dict[str, TokenBucket] = {}  # by host
        self._handshakes: dict[str, TokenBucket] = {}  # that name the network, by host
        self._connections: dict[str, list[Connection]] = {}  # by neighbour, oldest first
        self._callers: dict[str, Connection] = {}  # by the name of the front's end
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)  # labels: a call may come after its end
        self._units: dict[str, TokenBucket] = {}  # by neighbour
        self._seconds: dict[str, TokenBucket] = {}  # by neighbour
        # the last host of each neighbour; one that has a name is known once it has called
        self._hosts = {name: known for name, each in addresses.items() if (known := literal(each))}
        self._cloned_at: dict[str, float] = {}  # when the log last named a bundle that runs twice
        self._cloned: set[str] = set()  # neighbours that keep only the connections they have

    @property
    def target(self) -> str:
        """The address at which gRPC must listen."""
        return f"unix:{self._folder / 'grpc'}"

    def bind(self, address: str) -> None:
        """Take the port; raise OSError if that is not possible."""
        host, _, port = address.rpartition(":")
        infos = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, sockaddr in dict.fromkeys(infos):
            listener = socket.create_server(
                sockaddr[:2],
                family=family,
                backlog=BACKLOG,
                dualstack_ipv6=sockaddr[0] == "::",
            )
            listener.setblocking(False)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
            self._listeners.append(listener)

    def start(self) -> None:
        """Begin to accept connections; gRPC listens already."""
        _silence_names()
        for listener in self._listeners:
            self._spawn(self._accept(listener))
        self._spawn(self._check_connections())

    def stop_listening(self) -> None:
        """Refuse new connections, and end all handshakes; those of neighbours stay open."""
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def close(self) -> None:
        """Close everything."""
        self.stop_listening()
        for connection in list(self._callers.values()):
            connection.abort()

    def identify(self, peer: str) -> NodeIdentity:
        """Return the neighbour behind a call, by gRPC's name of its peer."""
        connection = self._callers.get(peer.rpartition("/")[2])
        if peer.rpartition("/")[2] in self._ended:
            raise UnreachableError("the connection of this call has ended.")
        if connection is None:
            raise RejectedError("unknown: the call did not come through the TLS front.")
        self.gatekeeper.check(connection.identity)
        return connection.identity

    # ---- strangers

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left
                self._drop_pending(self._busiest_host())
                await asyncio.sleep(RETRY_SECONDS)
                continue
            host = host_of(address[0])
            if self._may_try(host):
                attempt = Attempt(host)
                task = self._spawn(self._admit(accepted, attempt))
                self._pending[task] = attempt
                task.add_done_callback(self._pending.pop)
            else:
                accepted.close()
            await asyncio.sleep(0)  # a flood of connections must not hold up everything else

    def _may_try(self, host: str) -> bool:
        """Return whether a host may begin a handshake, and make room for it."""
        failures = self._failures.get(host)
        if failures is not None and failures.is_empty() and host not in self._hosts.values():
            self.rejections.record_stranger(host, "crowded", "too many failed handshakes.")
            return False
        if sum(other.host == host for other in self._pending.values()) >= MAX_PENDING_PER_HOST:
            self._drop_pending(host)
        elif len(self._pending) >= self._max_pending:
            self._drop_pending(self._busiest_host())
        return True

    def _check_name(self, _tls: Any, name: str | None, _context: ssl.SSLContext) -> int | None:
        """End a handshake whose caller does not know the network, or comes too often.

        Signatures come later, so this costs little.
        """
        attempt = _attempt.get()
        if (name or "").partition(".")[2] != self._domain:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        if not attempt.is_named:
            attempt.is_named = True
            handshakes = _bucket(self._handshakes, attempt.host, HANDSHAKES, HANDSHAKES_PER_SECOND)
            attempt.is_excessive = handshakes.is_empty()
            if not attempt.is_excessive:
                handshakes.take(1)
        return ssl.ALERT_DESCRIPTION_USER_CANCELLED if attempt.is_excessive else None

    def _busiest_host(self) -> str | None:
        found = Counter(attempt.host for attempt in self._pending.values()).most_common(1)
        return found[0][0] if found else None

    def _drop_pending(self, host: str | None) -> None:
        """End the oldest handshake of a host: an honest one takes milliseconds.

        Those of strangers end first, if a caller that knows the network shares their address.
        """
        found = [
            (attempt.is_named, task)
            for task, attempt in self._pending.items()
            if attempt.host == host and not task.cancelling()
        ]
        if host is not None and found:
            min(found, key=lambda each: each[0])[1].cancel()
            self._record_failure(host, "crowded", "too many handshakes at a time.")

    def _record_failure(self, host: str, reason: str, sentence: str) -> None:
        _bucket(self._failures, host, FAILURES, FAILURES_PER_SECOND).take(1)
        self.rejections.record_stranger(host, reason, sentence)

    async def _admit(self, accepted: socket.socket, attempt: Attempt) -> None:
        """Make the handshake, and connect a neighbour with gRPC."""
        host = attempt.host
        _attempt.set(attempt)
        try:
            tls, caller = await asyncio.get_running_loop().connect_accepted_socket(
                CallerEnd,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=CLOSE_SECONDS,
            )
        except (OSError, ssl.CertificateError) as error:
            reason = "crowded" if attempt.is_excessive else "handshake"
            self._record_failure(host, reason, describe_failure(error, attempt))
            return
        try:
            identity = self._authenticate(tls)
            await self._connect(tls, caller, identity, host)
        except RejectedError as error:
            tls.abort()
            reason, _, sentence = str(error).partition(": ")
            self._record_failure(host, reason, sentence)
        except OSError as error:  # no descriptor is left: a later attempt finds one
            tls.abort()
            self._drop_pending(self._busiest_host())
            self.rejections.record(identity.name, "busy", f"{error.strerror}.")
        except BaseException:
            tls.abort()
            raise
        else:
            self._hosts[identity.name] = host

    def _authenticate(self, tls: Any) -> NodeIdentity:
        found = tls.get_extra_info("ssl_object")
        if found.selected_alpn_protocol() != "h2":
            raise RejectedError("handshake: the caller does not speak HTTP/2.")
        certificate = ssl.DER_cert_to_PEM_cert(found.getpeercert(binary_form=True))
        return self.gatekeeper.authenticate(certificate.encode())

    # ---- neighbours

    async def _connect(
        self, tls: Any, caller: CallerEnd, identity: NodeIdentity, host: str
    ) -> None:
        """Connect a neighbour with gRPC, if it has a place left."""
        name, loop, label = identity.name, asyncio.get_running_loop(), secrets.token_hex(16)
        end = socket.socket(socket.AF_UNIX)
        end.setblocking(False)
        try:
            end.bind(str(self._folder / label))
            await loop.sock_connect(end, str(self._folder / "grpc"))
            os.unlink(self._folder / label)  # the name of the socket stays
        except BaseException:
            end.close()
            raise
        inner, server = await loop.create_unix_connection(ServerEnd, sock=end)
        connections = self._connections.setdefault(name, [])
        if name in self._cloned:
            inner.abort()
            self._report_clone(name, host)
            raise RejectedError(f"cloned bundle: '{name}' runs already.")
        if tls.is_closing() or len(connections) >= MAX_CONNECTIONS:
            inner.abort()
            raise RejectedError(f"busy: '{name}' has {len(connections)} connections already.")
        units = self._units.setdefault(name, TokenBucket(UNITS, UNITS_PER_SECOND))
        time_left = TokenBucket(TLS_SECONDS, TLS_SECONDS_PER_SECOND)
        seconds = self._seconds.setdefault(name, time_left)
        connection = Connection(self, identity, label, host, units, seconds, tls, inner)
        for older in connections:
            older.overtaken_at = older.overtaken_at or connection.begun
        self._callers[label] = connection
        connections.append(connection)
        caller.connection = server.connection = connection
        tls.resume_reading()
        inner.resume_reading()

    def forget(self, connection: Connection) -> None:
        """Give up the place of a connection that has ended."""
        if self._callers.pop(connection.label, None) is not None:
            self._ended.append(connection.label)
            name = connection.identity.name
            self._connections[name].remove(connection)
            if not self._connections[name]:
                self._cloned.discard(name)

    async def _check_connections(self) -> None:
        """Close the connections of certificates that are revoked or expire."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for connection in list(self._callers.values()):
                try:
                    self.gatekeeper.check(connection.identity)
                except RejectedError as error:
                    reason, _, sentence = str(error).partition(": ")
                    self.rejections.record(connection.identity.name, reason, sentence)
                    connection.abort()

    def record_calls(self, connection: Connection) -> None:
        """Shut out a bundle that runs twice: a node calls over its newest connection alone.

        The process that was here first stays, and no other gets in as long as it is connected.
        """
        overtaken_at = connection.overtaken_at
        if overtaken_at is None or time.monotonic() - overtaken_at < CLONE_SECONDS:
            return
        connection.overtaken_at, name = None, connection.identity.name
        self.rejections.counts["cloned bundle"] += 1
        self._report_clone(name, self._hosts[name])
        self._cloned.add(name)
        self._hosts[name] = connection.host
        connections = self._connections[name]
        for later in connections[connections.index(connection) + 1 :]:
            later.abort()

    def _report_clone(self, name: str, host: str) -> None:
        """Tell the operator, once in ten seconds."""
        now = time.monotonic()
        if now - self._cloned_at.get(name, -LOG_INTERVAL_SECONDS) >= LOG_INTERVAL_SECONDS:
            self._cloned_at[name] = now
            log.error("bundle runs twice, revoke it: node=%s refused_address=%s", name, host)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def build_context(bundle: Path) -> ssl.SSLContext:
    """Return the settings of TLS: version 1.3, and a certificate of this network."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(bundle / "ca.crt")
    context.load_cert_chain(bundle / "node.crt", bundle / "node.key")
    context.set_alpn_protocols(["h2"])
    context.num_tickets = 0  # every connection proves its certificate again
    return context


def _silence_names() -> None:
    """Keep Python from printing a caller's host name that is not ASCII: the handshake fails."""
    report = sys.unraisablehook

    def report_others(found: Any) -> None:
        if not (found.exc_type is UnicodeDecodeError and isinstance(found.object, bytes)):
            report(found)

    sys.unraisablehook = report_others


def max_descriptors() -> int:
    """Raise the limit of open files and connections as far as the system allows; return it."""
    try:
        import resource
    except ImportError:  # Windows sets no limit
        return MAX_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def host_of(address: str) -> str:
    """Return the host whose callers count together: an IPv4 address, or a network of IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return str(ipaddress.IPv6Network((found, 64), strict=False))
        found = found.ipv4_mapped
    return str(found)


def literal(address: str) -> str | None:
    """Return the host of an address, or None if it is a name."""
    try:
        return host_of(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None


def _bucket(
    buckets: dict[str, TokenBucket], host: str, size: float, per_second: float
) -> TokenBucket:
    """Return the allowance of a host, which is new for one that was not seen lately."""
    if host not in buckets and len(buckets) >= MAX_HOSTS:
        del buckets[next(iter(buckets))]
    return buckets.setdefault(host, TokenBucket(size, per_second))


def describe_failure(error: Exception, attempt: Attempt) -> str:
    """Return why a handshake failed, in a few words that are safe to log."""
    if attempt.is_excessive:
        return "too many handshakes."
    if isinstance(error, ssl.SSLError) and error.reason == "CALLBACK_FAILED":
        return "the caller does not name this network."
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}."
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"TLS: {error.reason.lower().replace('_', ' ')}."
    if isinstance(error, ConnectionAbortedError):
        return f"not done within {HANDSHAKE_SECONDS:g} s."
    return "the caller closed the connection."
