"""The bytes on real sockets against the simulator's ledger."""

import numpy as np
import pytest

import fedspd
from chaos.fleet import Fleet
from chaos.hosts import local_hosts
from chaos.relay import Relay
from fedspd.config import validate

NODES = 4


@pytest.mark.long
def test_socket_bytes_match_the_ledger_within_three_percent(tmp_path):
    """Sockets also carry TLS, HTTP/2 and heartbeats, which the ledger does not count."""
    x = np.random.default_rng(0).random((200, 1, 28, 28), np.float32)
    np.savez(tmp_path / "noise.npz", x=x, y=np.arange(200) % 10)
    config = validate(
        {
            "clients": NODES,
            "rounds": 6,
            "data": {"name": str(tmp_path / "noise.npz"), "examples": 20, "test_examples": 5},
            "topology": {"kind": "complete"},
            "model": {"name": "cnn"},
            "training": {"epochs": 1, "first_round_factor": 1},
            "method": "fedspd",
            "fedspd": {"final_epochs": 1},
        }
    )
    ledger = fedspd.run(config).summary
    hosts = local_hosts(NODES)
    with Relay(hosts) as relay, Fleet(config, tmp_path / "plant", hosts) as fleet:
        fleet.wait_for_end()
    assert ledger["models_sent"] >= 20
    assert relay.bytes == pytest.approx(ledger["bytes"]["point_to_point"], rel=0.03)
