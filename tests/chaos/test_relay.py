"""The relay that stands in front of every node: what it counts, and what weather it makes."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from chaos.hosts import Machine, local
from chaos.relay import NetworkConditions, Relay

LIMIT = 20.0  # seconds


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine whose program sends everything back in capitals, to one caller after the other."""
    (found,) = local(1)
    host, _, port = found.listen.rpartition(":")
    with socket.create_server((host, int(port))) as server:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        yield found


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


def call(machine: Machine) -> socket.socket:
    host, _, port = machine.address.rpartition(":")
    return socket.create_connection((host, int(port)), LIMIT)


def test_bytes_of_both_directions_are_counted(machine):
    with Relay([machine]) as relay, call(machine) as caller:
        caller.sendall(b"hello")
        assert caller.recv(4096) == b"HELLO"
        assert relay.bytes == 10


def test_every_chunk_is_delayed_on_both_ways(machine):
    with Relay([machine], NetworkConditions(delay=0.1)), call(machine) as caller:
        started = time.monotonic()
        caller.sendall(b"hello")
        assert caller.recv(4096) == b"HELLO"
        assert time.monotonic() - started >= 0.16


def test_a_stalled_chunk_holds_up_what_comes_behind_it(machine):
    with Relay([machine], NetworkConditions(stalled=1.0)) as relay, call(machine) as caller:
        started = time.monotonic()
        caller.sendall(b"first")
        while relay.bytes < 5:
            time.sleep(0.01)
        relay.weather = NetworkConditions()
        caller.sendall(b"second")
        assert b"".join(caller.recv(1) for _ in range(11)) == b"FIRSTSECOND"
        assert time.monotonic() - started >= 1.0


def test_a_reset_is_one(machine):
    with Relay([machine], NetworkConditions(reset=1.0)) as relay, call(machine) as caller:
        caller.sendall(b"hello")
        with pytest.raises(ConnectionResetError):
            caller.recv(4096)
        assert relay.resets == 1


def test_whoever_calls_a_node_that_is_down_is_sent_away():
    (machine,) = local(1)
    with Relay([machine]), call(machine) as caller:
        assert caller.recv(4096) == b""


def test_one_side_that_ends_ends_the_other(machine):
    with Relay([machine]) as relay:
        for word in (
            b"one",
            b"two",
        ):  # the program takes the second caller when it has learned that the first has gone
            with call(machine) as caller:
                caller.sendall(word)
                assert caller.recv(4096) == word.upper()
        assert relay.bytes == 12
