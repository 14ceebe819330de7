"""The transport over gRPC and mutual TLS 1.3.

Plaintext needs a network that was created for it, and the option on every node. The sender of a
message is the node that its certificate names; front.py refuses other callers at the handshake.
Its bounds, the options below and the limits in base.py bound the memory, threads and time that any
caller can take.
"""

import asyncio
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from pathlib import Path
from typing import Any, get_args

from fedspd.core.errors import (
    ConfigError,
    MalformedError,
    MissingExtraError,
    NodeError,
    RefusedError,
    RejectedError,
    TransportError,
    UnreachableError,
)
from fedspd.node.identity.certificates import NodeIdentity, host_name, now, parse_identity
from fedspd.node.identity.credentials import CertificateVerifier, Credentials
from fedspd.node.identity.manifest import Manifest
from fedspd.node.wire.base import BaseTransport, FrameStream, RpcMethod
from fedspd.node.wire.codec import (
    CHUNK_BYTES,
    MAX_FRAME_BYTES,
    InvalidMessageError,
    claimed_sender,
)
from fedspd.node.wire.front import Front, build_context, max_descriptors
from fedspd.node.wire.messages import Handler, Offer, Request
from fedspd.node.wire.outlet import Outlet
from fedspd.node.wire.sockets import SocketFolder

# gRPC reads this once, at import. It leaves TLS 1.2 a single suite, for RSA keys, which no node
# has; TLS 1.3 has its own suites. So only TLS 1.3 can connect.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES128-GCM-SHA256"
# Otherwise gRPC logs every failed handshake itself, and strangers could fill the disk.
os.environ["GRPC_VERBOSITY"] = "NONE"
# asyncio warns of each write to a connection that a caller has ended: one could fill a disk, too.
logging.getLogger("asyncio").setLevel(logging.ERROR)
try:
    import grpc
except ImportError:
    raise MissingExtraError.of("A network of peers", "node") from None

log = logging.getLogger("fedspd.node")
SERVICE = "fedspd.Peer"
REQUEST_TIMEOUT_SECONDS = 10.0  # for a request to follow its headers
MAX_VERIFIED = 256  # verified certificates that are remembered
MAX_CONNECTIONS = 4_096  # in plaintext: one takes about 70 kB
MAX_RPCS = 256  # at a time; base.py limits each neighbour to a few of them
REFUSALS = (
    "Connection refused",
    "DNS resolution failed",
)  # gRPC's words, in plaintext
# gRPC names the node's own socket, which says nothing to an operator
OWN_SOCKET = re.compile(r"failed to connect to all addresses; last error: \w+: unix:[^:]*: ")
MAX_DETAIL_CHARS = 300  # of a neighbour's error
Options = list[tuple[str, int | str]]

COMMON_OPTIONS: Options = [
    # A cut link is silent, so pings must find out that a connection is dead.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Without this, models fill all buffers of a slow link and heartbeats wait behind them.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2 * CHUNK_BYTES),
    ("grpc.max_metadata_size", 4_096),
    ("grpc.absolute_max_metadata_size", 8_192),
    ("grpc.per_message_decompression", 0),  # against decompression bombs
]
SERVER_OPTIONS: Options = [
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second node at the same address must fail
    ("grpc.max_concurrent_streams", 16),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
]
CLIENT_OPTIONS: Options = [
    *COMMON_OPTIONS,
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # the time limit of one attempt
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class GrpcTransport(BaseTransport):
    """The transport of a node on a device."""

    def __init__(
        self,
        manifest: Manifest,
        bundle: Path,
        name: str,
        *,
        insecure_plaintext: bool = False,
        address: str | None = None,
    ) -> None:
        """Load the bundle's credentials; listen at `address` if neighbours use another one."""
        super().__init__(manifest, name)
        _check_security(manifest, insecure_plaintext)
        self.address = address or manifest.member(name).address
        self.tls = TlsContext(manifest, bundle, name) if manifest.secure else None
        self._front: Front | None = None
        self._server: Any = None
        self._channels: dict[str, tuple[str, Any]] = {}  # the address and channel of a neighbour
        self._outlets: dict[str, Outlet] = {}  # by neighbour
        self._sockets: SocketFolder | None = None
        self._opening = asyncio.Lock()

    # ---- calls from neighbours

    async def start(self, handler: Handler) -> None:
        """Listen for calls of the neighbours."""
        self.handler = handler
        # Twice the maximum, so that a message that is a little too long is counted as malformed.
        max_message = ("grpc.max_receive_message_length", 2 * self.limits.message_bytes)
        max_connections = ("grpc.max_allowed_incoming_connections", _max_connections())
        options = [*SERVER_OPTIONS, max_message, max_connections]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_RPCS)
        handlers = {
            method: grpc.stream_stream_rpc_method_handler(self._rpc_handler(method))
            for method in get_args(RpcMethod)
        }
        service = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((service,))
        self._bind()
        await self._server.start()
        if self._front:
            self._front.start()

    def _bind(self) -> None:
        try:
            if self.tls:
                self._front = self._build_front(self.tls)
                self._server.add_insecure_port(self._front.target)
                self._front.bind(self.address)
            else:
                log.warning(
                    "insecure plaintext enabled, anyone can read, alter and forge messages: "
                    "address=%s",
                    self.address,
                )
                self._server.add_insecure_port(self.address)
        except (RuntimeError, OSError) as error:
            self._close_sockets()
            reason = (getattr(error, "strerror", None) or "refused").partition(" (")[0]
            raise NodeError(
                f"address = '{self.address}': cannot listen there ({reason}); expected a free port "
                "of this machine. Stop the process that uses the port, or set --listen."
            ) from None

    def _build_front(self, tls: "TlsContext") -> Front:
        neighbours = self.manifest.member(self.name).neighbours
        addresses = {name: self.manifest.member(name).address for name in neighbours}
        folder = self._socket_folder()
        domain = host_name(self.manifest.network, self.name).partition(".")[2]
        return Front(tls.server_context, tls, self.rejection_log, addresses, folder, domain)

    def _socket_folder(self) -> Path:
        if self._sockets is None:
            self._sockets = SocketFolder()
        return self._sockets.path

    def _rpc_handler(self, method: RpcMethod) -> Any:
        """Return gRPC's handler of a method.

        Requests are streams, so that the caller is authenticated before its request is read.
        """

        async def handle(requests: AsyncIterator[bytes], context: Any) -> FrameStream:
            try:
                async with aclosing(self._handle(method, requests, context)) as frames:
                    async for frame in frames:
                        yield frame
            except RejectedError as error:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
            except TransportError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

        return handle

    async def _handle(
        self, method: RpcMethod, requests: AsyncIterator[bytes], context: Any
    ) -> FrameStream:
        if self._front:
            data, sender = None, self._authenticate(self._front, context)
        else:
            data = await _read_request(requests)
            sender = self._trust_claim(data, context)
        with self.admit(sender, method):
            data = await _read_request(requests) if data is None else data
            async with aclosing(self.serve(sender, method, data)) as frames:
                async for frame in frames:
                    yield frame

    def _authenticate(self, front: Front, context: Any) -> str:
        try:
            return front.identify(context.peer()).name
        except RejectedError as error:
            reason, _, sentence = str(error).partition(": ")
            self.reject(_caller_host(context), reason, sentence)

    def _trust_claim(self, data: bytes, context: Any) -> str:
        """Return the sender that a plaintext message names, if it is a neighbour."""
        try:
            sender = claimed_sender(self.limits, data)
        except InvalidMessageError as error:
            self.reject(_caller_host(context), error.rule, str(error))
        if sender not in self.manifest.member(self.name).neighbours:
            sentence = f"'{sender}' and '{self.name}' have no link."
            self.reject(_caller_host(context), "not a neighbour", sentence)
        return sender

    # ---- calls to neighbours

    async def fetch(self, neighbour: str, request: Request, timeout_seconds: float) -> Offer:
        """Return the models that the neighbour sends for the request."""
        await self._channel(neighbour)
        count = self.limits.offer_bytes(len(request.wants), request)
        with self._expecting(neighbour, count):
            return await super().fetch(neighbour, request, timeout_seconds)

    async def send(
        self, neighbour: str, method: RpcMethod, data: bytes, timeout_seconds: float
    ) -> FrameStream:
        """Send an encoded message and yield the frames of the answer."""
        rpc = (await self._channel(neighbour)).unary_stream(f"/{SERVICE}/{method}")
        with self._expecting(neighbour, self.limits.message_bytes):
            call = rpc(data, timeout=timeout_seconds, wait_for_ready=False)
            try:
                async for frame in call:
                    yield frame
            except grpc.aio.AioRpcError as error:
                raise self._translate(neighbour, error) from None
            except asyncio.CancelledError:
                # gRPC raises this for a call that the neighbour cancelled, too.
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise UnreachableError(f"'{neighbour}' cancelled the call.") from None
            finally:
                call.cancel()

    def _expecting(self, neighbour: str, count: int) -> AbstractContextManager[None]:
        """Allow the neighbour to send so many bytes; in plaintext nobody counts them."""
        outlet = self._outlets.get(neighbour)
        return outlet.allowance.expecting(count) if outlet else nullcontext()

    async def _channel(self, neighbour: str) -> Any:
        """Return the channel to a neighbour, which is kept while its address stays the same."""
        async with self._opening:
            if self.tls and self.tls.is_revoked(neighbour):
                await self._close_channel(neighbour)
                raise RejectedError(f"'{neighbour}' is not called: its certificate is revoked.")
            address = self._address_of(neighbour)
            if neighbour not in self._channels or self._channels[neighbour][0] != address:
                await self._close_channel(neighbour)
                self._channels[neighbour] = (address, await self._open_channel(neighbour, address))
            return self._channels[neighbour][1]

    async def _open_channel(self, neighbour: str, address: str) -> Any:
        if not self.tls:
            return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        path = self._socket_folder() / f"to-{secrets.token_hex(8)}"
        outlet = Outlet(path, address, lambda: self._record_flood(neighbour))
        await outlet.open()
        self._outlets[neighbour] = outlet
        target = ("grpc.ssl_target_name_override", host_name(self.manifest.network, neighbour))
        options = [*CLIENT_OPTIONS, target]
        return grpc.aio.secure_channel(outlet.target, self.tls.channel_credentials, options=options)

    async def _close_channel(self, neighbour: str) -> None:
        """End all calls to a neighbour, and the connection."""
        if outlet := self._outlets.pop(neighbour, None):
            outlet.close()
        if found := self._channels.pop(neighbour, None):
            await found[1].close()

    def _record_flood(self, neighbour: str) -> None:
        """Count a neighbour that sent more than it was asked for as one of a malformed message."""
        with suppress(MalformedError), self._counting_malformed(neighbour):
            raise InvalidMessageError("flood", "more bytes than it was asked for.")

    def _translate(self, neighbour: str, error: Any) -> TransportError:
        outlet = self._outlets.get(neighbour)
        if outlet and outlet.refusal and error.code() == grpc.StatusCode.UNAVAILABLE:
            return RefusedError(
                f"'{neighbour}' cannot be reached ({outlet.refusal}: {outlet.address})."
            )
        return _translate(neighbour, error, outlet.address if outlet else "")

    def _address_of(self, neighbour: str) -> str:
        known = self.tls.identities.get(neighbour) if self.tls else None
        return known.address if known else self.manifest.member(neighbour).address

    def client_of(self, neighbour: str) -> int:
        """Return the neighbour's client number."""
        known = self.tls.identities.get(neighbour) if self.tls else None
        return known.client if known else super().client_of(neighbour)

    async def stop(self) -> None:
        """Close the channels and stop listening."""
        for neighbour in list(self._channels):
            await self._close_channel(neighbour)
        if self._front:
            self._front.stop_listening()
        if self._server is not None:
            await self._server.stop(grace=0.5)
            self._server = None
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self._front:
            self._front.close()
            self._front = None
        for outlet in self._outlets.values():
            outlet.close()
        self._outlets.clear()
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None


class TlsContext:
    """The TLS credentials of a node, and the authentication of its callers."""

    def __init__(self, manifest: Manifest, bundle: Path, name: str) -> None:
        own = Credentials.load(bundle)
        identity = parse_identity(own.certificate)
        if (identity.network, identity.name) != (manifest.network, name):
            raise NodeError(
                f"'{bundle}': the bundle of the node '{identity.name}' or of another network; "
                f"expected the bundle of '{name}'. Copy the right bundle."
            )
        self.verifier, self.clock = CertificateVerifier(bundle, identity), now
        self.server_context = build_context(bundle)
        self.channel_credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
        # Identities from certificates, by name: they are newer than the manifest.
        self.identities: dict[str, NodeIdentity] = {}
        self._serials = {member.name: member.serial for member in manifest.members}
        self._verified: dict[bytes, NodeIdentity] = {}

    def remember_revocations(self, memory: Path) -> None:
        """Refuse a list older than the newest one that this node has seen, in any run."""
        self.verifier.remember(memory)

    def authenticate(self, certificate: bytes) -> NodeIdentity:
        """Return the caller's identity, or raise RejectedError with `reason: sentence`."""
        identity = self._verified.get(certificate)
        if identity is None or self._is_outdated(identity):
            identity = self.verifier.verify(certificate)
            if len(self._verified) >= MAX_VERIFIED:
                self._verified.clear()
            self._verified[certificate] = identity
        self.identities[identity.name] = identity
        return identity

    def check(self, identity: NodeIdentity) -> None:
        """Raise RejectedError, with `reason: sentence`, if the certificate is no longer valid."""
        if self.verifier.is_revoked(identity.serial):
            raise RejectedError(f"revoked: the certificate of '{identity.name}' is revoked.")
        if self.clock() > identity.valid_until:
            raise RejectedError(f"expired: the certificate of '{identity.name}' is expired.")

    def _is_outdated(self, identity: NodeIdentity) -> bool:
        return self.verifier.is_revoked(identity.serial) or self.clock() > identity.valid_until

    def is_revoked(self, name: str) -> bool:
        """Return whether the node's certificate is revoked."""
        known = self.identities.get(name)
        serial = known.serial if known else self._serials.get(name)
        return serial is not None and self.verifier.is_revoked(serial)


def _check_security(manifest: Manifest, insecure_plaintext: bool) -> None:
    if insecure_plaintext and manifest.secure:
        raise ConfigError(
            "--insecure-plaintext: this network was created with TLS; expected no such option. "
            "Run the node without it."
        )
    if not manifest.secure and not insecure_plaintext:
        raise ConfigError(
            "secure = false: this network was created without TLS; expected the option "
            "--insecure-plaintext. Run the node with it, or create the network again."
        )


def _max_connections() -> int:
    """Return how many connections may be open at a time: at most half of the files."""
    return max(1, min(max_descriptors() // 2, MAX_CONNECTIONS))


async def _read_request(requests: AsyncIterator[bytes]) -> bytes:
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_SECONDS):
            return await anext(requests)
    except (StopAsyncIteration, TimeoutError):
        raise RejectedError("the request did not arrive.") from None


def _caller_host(context: Any) -> str:
    """Return a caller's host without its port, so that a log recognises the same caller."""
    return str(context.peer()).rpartition(":")[0]


def _translate(neighbour: str, error: Any, address: str = "") -> TransportError:
    """Return the error of a call that gRPC reports, with the neighbour's text made safe to log."""
    details = error.details() or error.code().name
    details = OWN_SOCKET.sub(lambda _: f"{address}: ", details)
    sentence = details[:MAX_DETAIL_CHARS].encode("unicode_escape").decode()
    if error.code() == grpc.StatusCode.PERMISSION_DENIED:
        return RejectedError(sentence)
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidMessageError(
            "size", f"a frame of more than {MAX_FRAME_BYTES} bytes from '{neighbour}' ({sentence})."
        )
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnreachableError(f"'{neighbour}' did not answer in time.")
    is_refused = any(sign in details for sign in REFUSALS)
    kind = RefusedError if is_refused else UnreachableError
    return kind(f"'{neighbour}' cannot be reached ({sentence}).")
