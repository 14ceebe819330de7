"""The relay in front of every node: it counts bytes, and delays, stalls and resets."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from chaos.hosts import Host, local_hosts
from chaos.relay import LinkConditions, Relay

TIMEOUT = 20.0  # seconds


@pytest.fixture
def host() -> Iterator[Host]:
    """A host whose server answers in capitals, one caller after the other."""
    (host,) = local_hosts(1)
    name, _, port = host.listen.rpartition(":")
    with socket.create_server((name, int(port))) as server:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        yield host


def echo(server: socket.socket) -> None:
    while True:
        try:
            caller, _ = server.accept()
            while said := caller.recv(4096):
                caller.sendall(said.upper())
            caller.close()
        except ConnectionError:
            continue
        except OSError:
            return


def connect(host: Host) -> socket.socket:
    name, _, port = host.address.rpartition(":")
    return socket.create_connection((name, int(port)), TIMEOUT)


def test_relay_counts_bytes_of_both_directions(host):
    with Relay([host]) as relay, connect(host) as caller:
        caller.sendall(b"hello")
        assert caller.recv(4096) == b"HELLO"
        assert relay.bytes == 10


def test_relay_delays_both_directions(host):
    with Relay([host], LinkConditions(delay=0.1)), connect(host) as caller:
        started = time.monotonic()
        caller.sendall(b"hello")
        assert caller.recv(4096) == b"HELLO"
        assert time.monotonic() - started >= 0.16


def test_relay_keeps_order_behind_a_stalled_chunk(host):
    with Relay([host], LinkConditions(stalled=1.0)) as relay, connect(host) as caller:
        started = time.monotonic()
        caller.sendall(b"first")
        while relay.bytes < 5:
            time.sleep(0.01)
        relay.conditions = LinkConditions()
        caller.sendall(b"second")
        assert b"".join(caller.recv(1) for _ in range(11)) == b"FIRSTSECOND"
        assert time.monotonic() - started >= 1.0


def test_relay_resets_a_connection(host):
    with Relay([host], LinkConditions(reset=1.0)) as relay, connect(host) as caller:
        caller.sendall(b"hello")
        with pytest.raises(ConnectionResetError):
            caller.recv(4096)
        assert relay.resets == 1


def test_relay_closes_a_connection_to_a_stopped_node():
    (host,) = local_hosts(1)
    with Relay([host]), connect(host) as caller:
        assert caller.recv(4096) == b""


def test_relay_closes_both_sides_of_a_connection(host):
    """The server accepts the second caller only after the first connection is closed."""
    with Relay([host]) as relay:
        for word in (b"one", b"two"):
            with connect(host) as caller:
                caller.sendall(word)
                assert caller.recv(4096) == word.upper()
        assert relay.bytes == 12


def test_relay_cuts_one_caller_off(host):
    with Relay([host], LinkConditions(cut=("127.0.0.1", host.address))) as relay:
        with connect(host) as caller:
            assert caller.recv(4096) == b""
        relay.conditions = LinkConditions(cut=("10.9.9.9", host.address))
        with connect(host) as caller:
            caller.sendall(b"hello")
            assert caller.recv(4096) == b"HELLO"
