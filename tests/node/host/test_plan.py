"""The training plan of a node on the device's own examples."""

from pathlib import Path

import numpy as np
import pytest

from fedspd.config import validate
from fedspd.core.block import Block
from fedspd.node.host import provisioning
from fedspd.node.host.bundle import open_bundle
from fedspd.node.host.plan import build_plan

CONFIG = {
    "method": "fedavg",
    "clients": 3,
    "rounds": 2,
    "topology": {"kind": "ring"},
    "data": {"name": "digits"},
    "model": {"name": "linear"},
}


def rows(block: Block) -> set[bytes]:
    return {row.numpy().tobytes() for row in block.x[0]}


@pytest.mark.parametrize("is_private", [True, False])
def test_example_stays_in_its_part_if_a_private_device_has_one_more(
    tmp_path: Path, is_private: bool
) -> None:
    """A permutation of all examples moves many of them, and the budget is for one."""
    privacy = {"noise": 1.0} if is_private else {}
    provisioning.create(validate({**CONFIG, "privacy": privacy}), tmp_path / "plant")
    bundle = open_bundle(tmp_path / "plant/nodes/node-0")
    x = np.random.default_rng(0).integers(0, 256, (100, 1, 8, 8), np.uint8)
    parts = []
    for count in (99, 100):
        np.savez(tmp_path / "own.npz", x=x[:count], y=np.arange(count) % 10)
        plan = build_plan(bundle, str(tmp_path / "own.npz"))
        parts.append((rows(plan.train), rows(plan.test)))
    (train, test), (train_with, test_with) = parts
    assert (train <= train_with and test <= test_with) == is_private
