"""A node under siege: a thousand idle connections of strangers, and others of random bytes."""

import os
import socket
import threading
from contextlib import suppress
from statistics import median

import pytest

from chaos import __main__ as chaos
from chaos.fleet import Fleet
from chaos.hosts import local_hosts
from chaos.relay import Relay

CONNECTIONS = 1000
MESSAGES = 20  # of random bytes per second
ROUNDS = 30


class Siege(threading.Thread):
    """A thousand connections, of which one sends random bytes and is replaced at a time."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        host, port = address.rsplit(":", 1)
        self.address, self.is_over = (host, int(port)), threading.Event()
        self.sent = 0  # messages

    def run(self) -> None:
        idle = [self._connect() for _ in range(CONNECTIONS)]
        while not self.is_over.wait(1 / MESSAGES):
            connection = self._connect()
            with suppress(OSError):  # the node may have closed it
                connection.sendall(os.urandom(4096))
            idle[self.sent % CONNECTIONS].close()
            idle[self.sent % CONNECTIONS] = connection
            self.sent += 1
        for connection in idle:
            connection.close()

    def _connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=5)


@pytest.mark.long
def test_siege_slows_a_node_by_less_than_half(tmp_path):
    config = chaos.build_config(tmp_path, {}, nodes=4, rounds=10_000)
    hosts = local_hosts(4)
    with Relay(hosts), Fleet(config, tmp_path / "plant", hosts) as fleet:
        fleet.wait_until(lambda: fleet.has_reached(5 + ROUNDS))
        siege = Siege(hosts[0].listen)
        siege.start()
        begun = fleet.observations_of("node-0")[-1].event["round"]
        fleet.wait_until(lambda: fleet.has_reached(begun + ROUNDS) and siege.sent > MESSAGES)
        siege.is_over.set()
        fleet.stop()
        rounds = [seen.event for seen in fleet.observations_of("node-0")]
    seconds = {event["round"]: event["seconds"]["total"] for event in rounds}
    calm = median(seconds[t] for t in range(5, 5 + ROUNDS))
    besieged = median(seconds[t] for t in range(begun + 1, begun + ROUNDS + 1))
    print(f"a round took {calm:.3f} s, and under siege {besieged:.3f} s")
    assert besieged < 1.5 * calm
    assert all(not event["missing"] for event in rounds if begun < event["round"] <= begun + ROUNDS)
