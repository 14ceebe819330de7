"""What FedSPD saves, on a ring of six clients whose choices are known."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedspd.algorithms.fedavg import FedAvg
from fedspd.algorithms.fedem import FedEM
from fedspd.algorithms.fedspd import FedSPD


def sent(network, ring, algorithm, choice: list[int] | None = None) -> tuple[int, int]:
    """Models in one round if a sending reaches all neighbours, and if each needs its own copy."""
    x = [torch.ones(4, 1, dtype=torch.float64)] * 6
    net = network(algorithm, x, x, ring)
    if choice is not None:
        net.state = replace(net.state, mixture_CS=certain(choice, algorithm.clusters))
    (traffic,) = net.simulator.round(1, ring).traffic
    return traffic.copies, len(traffic.transfer_T3)


def certain(choice: list[int], clusters: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choice), clusters).double()


@pytest.mark.parametrize(
    ("choice", "clusters", "copies"),
    [
        (
            [0, 0, 0, 1, 1, 1],
            2,
            8,
        ),  # edges 01, 12, 34 and 45 join clients of one cluster, both ways
        ([0, 0, 1, 1, 2, 2], 3, 6),  # edges 01, 23 and 45
        ([0, 0, 0, 0, 0, 0], 2, 12),  # all of one cluster: as FedAvg
    ],
)
def test_fedspd_sends_one_model_to_clients_of_the_same_cluster_for_any_s(
    network, ring, choice, clusters, copies
):
    assert sent(network, ring, FedAvg(clusters)) == (6, 12)
    assert sent(network, ring, FedEM(clusters)) == (6 * clusters, 12 * clusters)
    assert sent(network, ring, FedSPD(clusters), choice) == (6, copies)


def test_model_that_no_one_wants_is_not_sent(network, ring):
    """Clients 0 and 3 chose what no neighbour of theirs did; edges 12 and 45 are left."""
    assert sent(network, ring, FedSPD(3), [0, 1, 1, 0, 2, 2]) == (4, 4)
