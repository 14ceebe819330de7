"""Callers of a node that are no nodes: bare connections of strangers and insiders, without gRPC."""

import ctypes
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedspd.node.identity.certificates import host_name
from fedspd.node.wire.frames import PREFACE

TIMEOUT_SECONDS = 20.0
SETTINGS = bytes.fromhex("000000040000000000")


def frame(kind: int, flags: int, payload: bytes = b"", stream: int = 1) -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


FIRST_HEADERS, MORE_HEADERS = frame(1, 0, b"\0" * 100), frame(9, 0, b"\0" * 16_000)


def open_tcp(address: str, source: str = "") -> socket.socket:
    """Open a connection to a node, from an address of this machine."""
    host, _, port = address.rpartition(":")
    about = (host, int(port)), TIMEOUT_SECONDS
    return socket.create_connection(*about, source_address=(source, 0) if source else None)


def open_tls(
    bundle: Path, network: str, to: str, address: str, alpn: Sequence[str] = ("h2",)
) -> ssl.SSLSocket:
    """Open a connection to a node with the certificate of a bundle."""
    context = ssl.create_default_context(cafile=bundle / "ca.crt")
    context.load_cert_chain(bundle / "node.crt", bundle / "node.key")
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context.wrap_socket(open_tcp(address), server_hostname=host_name(network, to))


def send_endless_headers(connection: socket.socket, limit_bytes: int) -> int:
    """Send frames until the node closes the connection; return the bytes that went out."""
    sent, frames = 0, 16 * MORE_HEADERS
    with connection, suppress(OSError):
        connection.sendall(PREFACE + SETTINGS + FIRST_HEADERS)
        while sent < limit_bytes:
            connection.sendall(frames)
            sent += len(frames)
    return sent


def ask_for_new_keys(connection: ssl.SSLSocket, count: int) -> None:
    """Ask for new keys of TLS in records without data; Python's own ssl cannot do that.

    Raise AttributeError where Python does not say which library it uses.
    """
    import _ssl

    library = ctypes.CDLL(_ssl.__file__)
    update, flush = library.SSL_key_update, library.SSL_do_handshake
    update.argtypes, flush.argtypes = [ctypes.c_void_p, ctypes.c_int], [ctypes.c_void_p]
    # CPython keeps OpenSSL's pointer behind the two fields of an object and one of its own
    tls = id(connection._sslobj)  # type: ignore[attr-defined]
    own = ctypes.c_void_p.from_address(tls + 3 * ctypes.sizeof(ctypes.c_void_p))
    for _ in range(count):
        if update(own, 1) != 1 or flush(own) != 1:
            return
