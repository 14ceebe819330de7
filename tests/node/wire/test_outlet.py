"""A node's calls on loopback: what a neighbour that answers can make it read."""

import asyncio
import os
import socket
import ssl
import threading
import time
from contextlib import suppress

import pytest

from fedspd.core.errors import RefusedError, UnreachableError
from fedspd.node.wire import outlet as outlets
from fedspd.node.wire import sockets
from fedspd.node.wire.outlet import CALL_BYTES, SLACK_BYTES, Allowance, Outlet
from fedspd.node.wire.sockets import SocketFolder

TIMEOUT = 200.0
STATUS_OK = b"\x88\x5f\x10application/grpc"  # :status 200 and the content type, as HPACK


def run(work):
    return asyncio.run(work)


def frame(kind, payload=b"", flags=0, stream=1):
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


SETTINGS = frame(4, stream=0)
FLOODS = {
    "headers that never end": (SETTINGS + frame(1, STATUS_OK), frame(9, b"\0" * 16_000)),
    "windows": (SETTINGS, 1200 * frame(8, b"\0\0\0\1", stream=0)),
    "unknown frames": (SETTINGS, frame(200, b"\0" * 16_000)),
}


class HostileServer:
    """A node that answers every call with a flood, under its own valid certificate."""

    def __init__(self, world, name, first, then, limit_bytes):
        bundle = world.folder / "nodes" / name
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(bundle / "node.crt", bundle / "node.key")
        self.context.set_alpn_protocols(["h2"])
        host, port = world.manifest.member(name).address.split(":")
        self.listener = socket.create_server((host, int(port)))
        self.first, self.then, self.limit_bytes = first, then, limit_bytes
        self.sent = []  # bytes, by connection
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with suppress(OSError):
            while True:
                self.flood(self.listener.accept()[0])

    def flood(self, raw):
        with suppress(OSError), self.context.wrap_socket(raw, server_side=True) as connection:
            connection.recv(65536)
            self.sent.append(0)
            connection.sendall(self.first)
            while self.sent[-1] < self.limit_bytes:
                connection.sendall(self.then)
                self.sent[-1] += len(self.then)


@pytest.mark.parametrize("kind", FLOODS)
def test_caller_cuts_off_a_neighbour_that_sends_more_than_it_was_asked_for(secure, kind):
    """gRPC itself reads on: 800 MB of window updates took up to 413 MB of memory."""

    async def work():
        server = HostileServer(secure, "b", *FLOODS[kind], 100_000_000)
        async with secure.running("a", "d") as (a, d):
            while not a.is_muted("b"):  # until its fifth flood
                with suppress(UnreachableError):
                    await a.hello("b", secure.hello(), TIMEOUT)
                await asyncio.sleep(0.01)  # between its attempts gRPC fails at once
            assert a.rejected == {"flood": 5}
            assert max(server.sent) < SLACK_BYTES + 20_000_000  # what the sockets hold
            await d.hello("a", secure.hello(), TIMEOUT)
        server.listener.close()

    run(work())


def test_allowance_is_lost_when_a_call_ends():
    now = [0.0]
    allowance = Allowance(clock=lambda: now[0])
    with allowance.expecting(1_000_000):
        assert allowance.take(1_050_000 + CALL_BYTES)
        assert allowance.take(SLACK_BYTES)
        assert not allowance.take(1)
    now[0] += 1000.0
    with allowance.expecting(1_000_000):
        pass
    assert allowance.take(SLACK_BYTES)
    assert not allowance.take(1)


def test_caller_tries_all_addresses_of_a_name(secure, monkeypatch):
    """The first of them refuses, as ::1 may do for a node that listens at 127.0.0.1."""
    host, port = secure.manifest.member("b").address.split(":")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        other = closed.getsockname()[1]
    info = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*info, ("127.0.0.1", other)), (*info, (host, int(port)))]

    async def work():
        async with secure.running("a") as (a,):
            async with secure.running("b"):
                monkeypatch.setattr(outlets.socket, "getaddrinfo", lambda *_, **__: found)
                await a.hello("b", secure.hello(), TIMEOUT)
            errors = []
            while not errors or not isinstance(errors[-1], RefusedError):
                try:
                    await a.hello("b", secure.hello(), TIMEOUT)
                except UnreachableError as error:  # at first, of the connection that was open
                    errors.append(error)
            assert "connection refused" in str(errors[-1])

    run(work())


def test_name_that_does_not_resolve_is_refused_and_holds_nobody_up(tmp_path, monkeypatch):
    """A silent name server costs one thread, and no attempt waits for another."""
    answer, asked = threading.Event(), []

    def look_up(*values, **options):
        asked.append(values)
        answer.wait()
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(outlets.socket, "getaddrinfo", look_up)

    async def work():
        outlet = Outlet(tmp_path / "to-b", "b.plant.example:7700", lambda: None)
        await outlet.open()
        ends = [await asyncio.open_unix_connection(str(outlet.path)) for _ in range(3)]
        while len(outlet._tasks) < 3 or not asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)  # all three wait for the name now
        ends[0][1].close()  # gRPC gives an attempt up
        answer.set()
        for reader, _ in ends[1:]:
            assert await reader.read() == b""
        assert (len(asked), outlet.refusal) == (1, "its name does not resolve")
        outlet.close()

    run(work())


# ---- the folder of the sockets


def test_folder_of_a_killed_node_is_removed_and_that_of_a_living_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(sockets.tempfile, "gettempdir", lambda: str(tmp_path))
    living, killed = SocketFolder(), SocketFolder()
    (killed.path / "grpc").touch()
    killed._lock.release()  # as the system does when a process ends
    (tmp_path / f"{sockets.PREFIX}link").symlink_to("/")
    young = SocketFolder()
    assert killed.path.exists()  # it could belong to a node that starts right now
    later = time.time() + 100
    monkeypatch.setattr(sockets.time, "time", lambda: later)
    newest = SocketFolder()
    assert {path.name for path in tmp_path.iterdir() if not path.is_symlink()} == {
        each.path.name for each in (living, young, newest)
    }
    assert os.stat(newest.path).st_mode & 0o777 == 0o700
    for each in (living, young, newest):
        each.close()
    assert [path.name for path in tmp_path.iterdir()] == [f"{sockets.PREFIX}link"]
