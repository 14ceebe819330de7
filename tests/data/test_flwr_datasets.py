"""The partitioners of flwr-datasets as they are.

Its pins do not fit those of fedspd, so it has an environment of its own, whose interpreter
FEDSPD_FLWR_PYTHON names. What fedspd needs besides comes from the environment of the tests.
"""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

PYTHON = os.environ.get("FEDSPD_FLWR_PYTHON")
SCRIPT = """
import sys
sys.path.append(sys.argv[1])
import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, NaturalIdPartitioner
import fedspd

x = np.random.default_rng(0).normal(size=(120, 4))
rows = {"x": x.tolist(), "label": [int(v > 0) for v in x[:, 0]], "who": ["ann", "bob"] * 60}
dataset = Dataset.from_dict(rows)
for partitioner in (
    IidPartitioner(num_partitions=3),
    DirichletPartitioner(3, "label", alpha=1.0, min_partition_size=5, seed=0),
    NaturalIdPartitioner(partition_by="who"),
):
    partitioner.dataset = dataset
    result = fedspd.run({"method": "fedavg", "rounds": 2}, data=partitioner)
    sizes = [len(partitioner.load_partition(i)) for i in range(partitioner.num_partitions)]
    clients = result.experiment.federation.description["clients"]
    counts = [sum(c["train"]["counts"]) + sum(c["test"]["counts"]) for c in clients]
    assert counts == sizes, (counts, sizes)
    print(type(partitioner).__name__, *counts)
"""


@pytest.mark.long
@pytest.mark.skipif(
    PYTHON is None, reason="needs flwr-datasets: FEDSPD_FLWR_PYTHON names its interpreter"
)
def test_partitioners_give_the_clients():
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT, sysconfig.get_paths()["purelib"]],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == [
        "IidPartitioner",
        "DirichletPartitioner",
        "NaturalIdPartitioner",
    ]
    assert all(sum(map(int, line[1:])) == 120 for line in lines)
