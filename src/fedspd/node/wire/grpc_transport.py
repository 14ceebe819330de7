"""Peers over gRPC and mutual TLS 1.3. Plaintext only in a network that was created for it, and only when asked for.

The sender of a message is whoever its certificate names. Nobody else is listened to, and nobody can take more than a
bounded share of this node's memory, threads and time: see the options below, and the limits of courier.py.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fedspd.core.errors import (
    ConfigError,
    MissingExtraError,
    NodeError,
    RejectedError,
    TransportError,
    UnreachableError,
)
from fedspd.node.identity.certificates import NodeIdentity, host_name, now, parse_identity
from fedspd.node.identity.credentials import CertificateVerifier, Credentials
from fedspd.node.identity.manifest import Manifest
from fedspd.node.wire.base import BaseTransport, Frames, Kind
from fedspd.node.wire.codec import CHUNK, CHUNK_FRAME, InvalidMessageError, claimed
from fedspd.node.wire.messages import Handler

# gRPC reads it once, when it is imported: of TLS 1.2 only a suite for RSA is left, and our keys are none. TLS 1.3 has its own.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES128-GCM-SHA256"
try:
    import grpc
except ImportError:
    raise MissingExtraError.of("A network of peers", "node") from None

log = logging.getLogger("fedspd.node")
SERVICE = "fedspd.Peer"
KINDS: tuple[Kind, ...] = ("Hello", "Announce", "Fetch")
SILENCE = 10.0  # seconds for a request to follow its headers
CHECKED = 256  # certificates that are known to be good
DESCRIPTORS = 65_536  # of files and connections: more are not asked of the system
RPCS = 256  # under way at once; no neighbour can have more than a few of them (courier.py)
SENTENCE = 300  # characters of what a neighbour says about an error
Options = list[tuple[str, int | str]]

COMMON: Options = [
    (
        "grpc.keepalive_time_ms",
        5_000,
    ),  # a link that was cut says nothing: a connection over it must not be waited for
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    (
        "grpc.http2.bdp_probe",
        0,
    ),  # else models fill every buffer of a slow link, and pings and heartbeats wait behind them
    ("grpc.http2.lookahead_bytes", 2 * CHUNK),
    ("grpc.max_metadata_size", 4_096),
    ("grpc.absolute_max_metadata_size", 8_192),
    ("grpc.per_message_decompression", 0),  # a few bytes could become many
]
SERVER: Options = [
    *COMMON,
    ("grpc.so_reuseport", 0),  # a second node at the same address must fail
    ("grpc.max_concurrent_streams", 16),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
]
CLIENT: Options = [
    *COMMON,
    ("grpc.max_receive_message_length", CHUNK_FRAME),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long one attempt may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class GrpcTransport(BaseTransport):
    def __init__(
        self,
        manifest: Manifest,
        bundle: Path,
        name: str,
        *,
        insecure_plaintext: bool = False,
        address: str | None = None,
    ) -> None:
        """`address`: where to listen, if it is not where others call."""
        super().__init__(manifest, name)
        _refuse_contradiction(manifest, insecure_plaintext)
        self.address = address or manifest.member(name).address
        self.door = TlsContext(manifest, bundle, name) if manifest.secure else None
        self._server: Any = None
        self._channels: dict[str, tuple[str, Any]] = {}  # by neighbour, with the address

    # ---- what neighbours ask

    async def start(self, handler: Handler) -> None:
        self.handler = handler
        longest = (
            "grpc.max_receive_message_length",
            2 * self.rules.message_bytes,
        )  # twice: what is too long is rubbish, and counted
        most = ("grpc.max_allowed_incoming_connections", _room_for_connections())
        self._server = grpc.aio.server(
            options=[*SERVER, longest, most], maximum_concurrent_rpcs=RPCS
        )
        handlers = {
            kind: grpc.stream_stream_rpc_method_handler(self._handling(kind)) for kind in KINDS
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        self._bind()
        await self._server.start()

    def _bind(self) -> None:
        try:
            if self.door:
                self._server.add_secure_port(self.address, self.door.server)
            else:
                log.warning(
                    "INSECURE: this node speaks plaintext; anybody can read, alter and send messages in any node's name"
                )
                self._server.add_insecure_port(self.address)
        except RuntimeError:
            raise NodeError(
                f"The address '{self.address}' cannot be listened on: another process has it, or it is not of this machine; "
                "stop the other one, or listen elsewhere."
            ) from None

    def _handling(self, kind: Kind) -> Any:
        """All requests are streams to gRPC: so who calls is known before a byte of the request is read, or waited for."""

        async def handle(requests: AsyncIterator[bytes], context: Any) -> Frames:
            try:
                async with aclosing(self._handle(kind, requests, context)) as answer:
                    async for frame in answer:
                        yield frame
            except RejectedError as error:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
            except TransportError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

        return handle

    async def _handle(self, kind: Kind, requests: AsyncIterator[bytes], context: Any) -> Frames:
        early = b"" if self.door else await _first(requests)
        sender = self._certified(context) if self.door else self._claimed(early, context)
        with self.admitted(sender, kind):
            async with aclosing(
                self.serve(sender, kind, early or await _first(requests))
            ) as answer:
                async for frame in answer:
                    yield frame

    def _certified(self, context: Any) -> str:
        assert self.door is not None
        try:
            return self.door.caller(context.auth_context()).name
        except RejectedError as error:
            reason, _, sentence = str(error).partition(": ")
            self.refuse(_host(context), reason, sentence)

    def _claimed(self, data: bytes, context: Any) -> str:
        try:
            sender = claimed(self.rules, data)
        except InvalidMessageError as error:
            self.refuse(_host(context), error.rule, str(error))
        if sender not in self.manifest.member(self.name).neighbours:
            self.refuse(
                _host(context), "not a neighbour", f"'{sender}' and '{self.name}' have no link."
            )
        return sender

    # ---- what the node asks

    async def carry(self, neighbour: str, kind: Kind, data: bytes, limit: float) -> Frames:
        call = self._channel(neighbour).unary_stream(f"/{SERVICE}/{kind}")(
            data, timeout=limit, wait_for_ready=False
        )
        try:
            async for frame in call:
                yield frame
        except grpc.aio.AioRpcError as error:
            raise _failure(neighbour, error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise UnreachableError(
                f"'{neighbour}' has cancelled the call."
            ) from None  # gRPC makes no difference between the two
        finally:
            call.cancel()

    def _channel(self, neighbour: str) -> Any:
        """One for each neighbour, kept as long as it stays where it is."""
        if self.door and self.door.is_revoked(neighbour):
            raise RejectedError(f"'{neighbour}' is not called: its certificate is in revoked.crl.")
        address = self._address(neighbour)
        if neighbour not in self._channels or self._channels[neighbour][0] != address:
            self._channels[neighbour] = (address, self._connected(neighbour, address))
        return self._channels[neighbour][1]

    def _connected(self, neighbour: str, address: str) -> Any:
        if not self.door:
            return grpc.aio.insecure_channel(address, options=CLIENT)
        expected = ("grpc.ssl_target_name_override", host_name(self.manifest.network, neighbour))
        return grpc.aio.secure_channel(address, self.door.channel, options=[*CLIENT, expected])

    def _address(self, neighbour: str) -> str:
        met = self.door.met.get(neighbour) if self.door else None
        return met.address if met else self.manifest.member(neighbour).address

    def client(self, neighbour: str) -> int:
        met = self.door.met.get(neighbour) if self.door else None
        return met.client if met else self.manifest.member(neighbour).client

    async def stop(self) -> None:
        for _, channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        if self._server is not None:
            await self._server.stop(grace=0.5)
            self._server = None


class TlsContext:
    """Who may come in, and with what this node shows who it is."""

    def __init__(self, manifest: Manifest, bundle: Path, name: str) -> None:
        own = Credentials.load(bundle)
        me = parse_identity(own.certificate)
        if (me.network, me.name) != (manifest.network, name):
            raise NodeError(
                f"'{bundle}' is the bundle of the node '{me.name}', or of another network: expected that of '{name}'."
            )
        self.gate, self.clock = CertificateVerifier(bundle, me), now
        self.server = grpc.ssl_server_credentials(
            [(own.key, own.certificate)], own.ca, require_client_auth=True
        )
        self.channel = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
        self.met: dict[
            str, NodeIdentity
        ] = {}  # by name: what the certificate says is newer than the manifest
        self._serials = {member.name: member.serial for member in manifest.members}
        self._checked: dict[bytes, NodeIdentity] = {}

    def caller(self, context: dict[str, list[bytes]]) -> NodeIdentity:
        """Raises RejectedError, with the reason first."""
        version = bytes(context.get("ssl_tls_version", [b"?"])[0]).decode()
        if version != "TLSv1.3":
            raise RejectedError(f"old TLS: the connection is {version}, expected TLSv1.3.")
        (certificate,) = context["x509_pem_cert"]
        found = self._checked.get(certificate)
        if found is None or self.gate.is_revoked(found.serial) or self.clock() > found.valid_until:
            found = self.gate.verify(certificate)
            if len(self._checked) >= CHECKED:
                self._checked.clear()
            self._checked[certificate] = found
        self.met[found.name] = found
        return found

    def is_revoked(self, name: str) -> bool:
        serial = self.met[name].serial if name in self.met else self._serials.get(name)
        return serial is not None and self.gate.is_revoked(serial)


def _refuse_contradiction(manifest: Manifest, insecure_plaintext: bool) -> None:
    if insecure_plaintext and manifest.secure:
        raise ConfigError(
            "--insecure-plaintext: this network was created secure, and stays so; leave the option out."
        )
    if not manifest.secure and not insecure_plaintext:
        raise ConfigError(
            "This network was created without encryption: run its nodes with --insecure-plaintext, or create it anew."
        )


def _room_for_connections() -> int:
    """As many as the system lets be raised to, and half of them for those who call: strangers must not take what files need."""
    try:
        import resource
    except ImportError:  # Windows sets no limit
        return DESCRIPTORS // 2
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, wanted // 2)


async def _first(requests: AsyncIterator[bytes]) -> bytes:
    try:
        async with asyncio.timeout(SILENCE):
            return await anext(requests)
    except (StopAsyncIteration, TimeoutError):
        raise RejectedError("the request did not come.") from None


def _host(context: Any) -> str:
    """Where a stranger calls from, without its port: so that a log can tell the same one."""
    return str(context.peer()).rpartition(":")[0]


def _failure(neighbour: str, error: Any) -> TransportError:
    sentence = (error.details() or error.code().name)[:SENTENCE].encode("unicode_escape").decode()
    if error.code() == grpc.StatusCode.PERMISSION_DENIED:
        return RejectedError(sentence)
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidMessageError(
            "size", f"'{neighbour}' sent a frame of more than {CHUNK_FRAME} bytes ({sentence})."
        )
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnreachableError(f"'{neighbour}' did not answer in time.")
    return UnreachableError(f"'{neighbour}' cannot be reached ({sentence}).")
