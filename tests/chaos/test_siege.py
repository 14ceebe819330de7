"""A node under siege by strangers, and by an insider, on real processes of this machine.

`pytest -s -m long tests/chaos/test_siege.py` prints the numbers of docs/security.md and
docs/reliability.md.
"""

import itertools
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

import pytest

from chaos import __main__ as chaos
from chaos.callers import open_tcp, open_tls, send_endless_headers
from chaos.fleet import PROGRAM, Fleet
from chaos.hosts import local_hosts
from chaos.relay import Relay
from fedspd.node.host.provisioning import revoke
from fedspd.node.identity.certificates import read_identity

CONNECTIONS = 1000
MESSAGES = 20  # of random bytes per second
ROUNDS = 30
MANY_CONNECTIONS = 10_000
SOURCES = [f"127.0.0.{i}" for i in range(2, 6)]  # of strangers; neighbours call from 127.0.0.1
FEW_FILES = 256  # and connections that a node may open
FLOOD_SECONDS = 20.0
LIMIT_MEGABYTES = 50


class Siege(threading.Thread):
    """A thousand connections, of which one sends random bytes and is replaced at a time."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.address, self.is_over = address, threading.Event()
        self.sent = 0  # messages

    def run(self) -> None:
        idle = [open_tcp(self.address) for _ in range(CONNECTIONS)]
        while not self.is_over.wait(1 / MESSAGES):
            connection = open_tcp(self.address)
            with suppress(OSError):  # the node may have closed it
                connection.sendall(os.urandom(4096))
            idle[self.sent % CONNECTIONS].close()
            idle[self.sent % CONNECTIONS] = connection
            self.sent += 1
        for connection in idle:
            connection.close()


@contextmanager
def fleet_of_four(folder: Path, program: str = PROGRAM) -> Iterator[Fleet]:
    """Yield a running network, whose first node runs another program, after a few rounds."""
    config = chaos.build_config(folder, {}, nodes=4, rounds=10_000)
    hosts = local_hosts(4)
    with Relay(hosts):
        fleet = Fleet(config, folder / "plant", hosts)
        fleet.nodes["node-0"].program = program
        with fleet:
            fleet.wait_until(lambda: fleet.has_reached(5))
            yield fleet


def megabytes(fleet: Fleet) -> float:
    """Return the resident memory of the first node."""
    process = fleet.nodes["node-0"].process
    assert process is not None
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def crowd(address: str) -> Iterator[list[socket.socket]]:
    """Yield idle connections of strangers from several addresses; the node may close them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * MANY_CONNECTIONS), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        sources = itertools.islice(itertools.cycle(SOURCES), MANY_CONNECTIONS)
        yield [stack.enter_context(open_tcp(address, source)) for source in sources]


def missing_after(fleet: Fleet, at: float) -> list[str]:
    """Return the neighbours that the first node missed in any round since then."""
    seen = fleet.observations_of("node-0", at)
    return sorted({name for one in seen for name in one.event.get("missing", ())})


@pytest.mark.long
def test_siege_slows_a_node_by_less_than_half(tmp_path):
    with fleet_of_four(tmp_path) as fleet:
        fleet.wait_until(lambda: fleet.has_reached(5 + ROUNDS))
        siege = Siege(fleet.nodes["node-0"].host.listen)
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


@pytest.mark.long
def test_ten_thousand_idle_strangers_cost_little_memory(tmp_path):
    with fleet_of_four(tmp_path) as fleet:
        before, at = megabytes(fleet), time.monotonic()
        with crowd(fleet.nodes["node-0"].host.listen):
            after = fleet.observations_of("node-0")[-1].event["round"] + 10
            fleet.wait_until(lambda: fleet.has_reached(after))
            print(f"memory: {before:.0f} MB before, {megabytes(fleet):.0f} MB beside the strangers")
            assert megabytes(fleet) - before < LIMIT_MEGABYTES
        assert missing_after(fleet, at) == []


@pytest.mark.long
def test_restarted_neighbour_gets_back_in_where_descriptors_are_few(tmp_path):
    """The strangers take all that they can; the places of neighbours are not among these."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, 2 * ({FEW_FILES},)); "
    with ExitStack() as stack:
        fleet = stack.enter_context(fleet_of_four(tmp_path, limit + PROGRAM))
        stack.enter_context(crowd(fleet.nodes["node-0"].host.listen))
        killed_at = fleet.kill("node-1")
        fleet.wait_until(lambda: fleet.first_without("node-1", killed_at) is not None)
        restarted_at = fleet.restart("node-1")
        fleet.wait_until(lambda: "node-0" in fleet.first_with("node-1", restarted_at))
        back = fleet.first_with("node-1", restarted_at)["node-0"].at - restarted_at
        print(f"received from the restarted neighbour after {back:.1f} s")


@pytest.mark.long
@pytest.mark.parametrize("is_revoked", [False, True])
def test_headers_that_never_end_take_no_memory(tmp_path, is_revoked):
    """The insider has the bundle of a neighbour that was killed."""
    with fleet_of_four(tmp_path) as fleet:
        fleet.kill("node-1")
        bundle, target = fleet.nodes["node-1"].bundle, fleet.nodes["node-0"]
        network = read_identity(bundle / "node.crt").network
        if is_revoked:
            revoke(fleet.folder, "node-1")
        before, at, sent, peak = megabytes(fleet), time.monotonic(), 0, 0.0
        while time.monotonic() - at < FLOOD_SECONDS:
            with suppress(OSError):  # it has its allowance of handshakes
                bare = open_tls(bundle, network, "node-0", target.host.listen)
                sent += send_endless_headers(bare, 50_000_000)
            peak = max(peak, megabytes(fleet))
        rate = sent / FLOOD_SECONDS / 1e6
        print(f"memory: {before:.0f} MB before, at most {peak:.0f} MB; {rate:.0f} MB/s were sent")
        assert peak - before < LIMIT_MEGABYTES
        fleet.poll()
        assert missing_after(fleet, at) in ([], ["node-1"])
        assert fleet.observations_of("node-0", at)
