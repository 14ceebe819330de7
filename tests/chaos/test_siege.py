"""Strangers at the door of a running node: a thousand connections that say nothing, and others that say anything."""

import os
import socket
import threading
from contextlib import suppress
from statistics import median

import pytest

from chaos import __main__ as chaos
from chaos.fleet import Fleet
from chaos.hosts import local
from chaos.relay import Relay

CONNECTIONS = 1000
SHOUTS = 20  # a second, of random bytes
ROUNDS = 30


class Siege(threading.Thread):
    """Keeps a thousand connections open, calls anew where it is hung up on, and shouts random bytes."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        host, port = address.rsplit(":", 1)
        self.place, self.over = (host, int(port)), threading.Event()
        self.shouts = 0

    def run(self) -> None:
        idle = [self._call() for _ in range(CONNECTIONS)]
        while not self.over.wait(1 / SHOUTS):
            stranger = self._call()
            self._shout(stranger)
            idle[self.shouts % CONNECTIONS].close()
            idle[self.shouts % CONNECTIONS] = stranger
            self.shouts += 1
        for connection in idle:
            connection.close()

    def _call(self) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(5)
        connection.connect(self.place)
        return connection

    def _shout(self, connection: socket.socket) -> None:
        with suppress(OSError):  # it may have hung up already
            connection.sendall(os.urandom(4096))


@pytest.mark.long
def test_strangers_cost_a_node_less_than_half_a_round(tmp_path):
    config = chaos.config(tmp_path, {}, nodes=4, rounds=10_000)
    machines = local(4)
    with Relay(machines), Fleet(config, tmp_path / "plant", machines) as fleet:
        fleet.until(lambda: fleet.everyone_at(5 + ROUNDS))
        siege = Siege(machines[0].listen)
        siege.start()
        begun = fleet.of("node-0")[-1].event["round"]
        fleet.until(lambda: fleet.everyone_at(begun + ROUNDS) and siege.shouts > SHOUTS)
        siege.over.set()
        fleet.leave()
        rounds = [seen.event for seen in fleet.of("node-0")]
    seconds = {event["round"]: event["seconds"]["total"] for event in rounds}
    calm = median(seconds[t] for t in range(5, 5 + ROUNDS))
    besieged = median(seconds[t] for t in range(begun + 1, begun + ROUNDS + 1))
    print(f"a round took {calm:.3f} s, and under siege {besieged:.3f} s")
    assert besieged < 1.5 * calm
    assert all(not event["missing"] for event in rounds if begun < event["round"] <= begun + ROUNDS)
