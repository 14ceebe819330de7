"""What a socket carries is what the simulator has in its ledger."""

import numpy as np
import pytest

import fedspd
from chaos.fleet import Fleet
from chaos.hosts import local
from chaos.relay import Relay
from fedspd.config import validate

NODES = 4


def test_the_bytes_on_the_sockets_are_those_of_the_ledger_within_three_percent(tmp_path):
    """All of them: TLS, HTTP/2, heartbeats and announcements stand against the ledger's models and announcements."""
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "noise.npz", x=rng.random((200, 1, 28, 28), np.float32), y=np.arange(200) % 10
    )
    config = validate(
        {
            "clients": NODES,
            "rounds": 6,
            "data": {"name": str(tmp_path / "noise.npz"), "examples": 20, "test_examples": 5},
            "topology": {"kind": "complete"},
            "model": {"name": "cnn"},
            "training": {"epochs": 1, "first_round_factor": 1},
            "fedspd": {"final_epochs": 1},
        }
    )
    ledger = fedspd.run(config).summary
    machines = local(NODES)
    with Relay(machines) as relay, Fleet(config, tmp_path / "plant", machines) as fleet:
        fleet.wait()
    assert ledger["models_sent"] >= 20
    assert relay.bytes == pytest.approx(ledger["bytes"]["point_to_point"], rel=0.03)
