"""What one exchange sends: every model by sender, receiver and cluster.

First everybody tells its neighbours which clusters it offers and wants, in a few bytes; then a model goes only to those
that want its cluster. Shapes: N clients, K models offered by each, M clusters wanted by each, T transfers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspd.core.graph import Graph

SERVER = -1
NOTHING = -1  # the cluster of an offer that is not made
HEADER = 16  # bytes of an announcement besides the clusters: round and note
CLUSTER = 4  # bytes of a cluster's number


@dataclass(frozen=True)
class Traffic:
    transfer_T3: NDArray[np.int64]  # sender, receiver, cluster of every model, point to point
    copies: int  # models sent if one sending reaches all neighbours (multicast)
    announcements: int  # directed edges that an announcement crosses
    announcement_bytes: int
    model_bytes: int
    is_model: bool = True  # whether what was sent counts as models

    @property
    def point_to_point_bytes(self) -> int:
        return (
            len(self.transfer_T3) * self.model_bytes + self.announcements * self.announcement_bytes
        )

    @property
    def multicast_bytes(self) -> int:
        return self.copies * self.model_bytes + self.announcements * self.announcement_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "models": self.transfer_T3.tolist(),
            "model_bytes": self.model_bytes,
            "announcements": self.announcements,
            "announcement_bytes": self.announcement_bytes,
            "copies": self.copies,
            "is_model": self.is_model,
        }


def traffic(
    graph: Graph,
    cluster_NK: NDArray[np.int64],
    want_NM: NDArray[np.int64],
    model_bytes: int,
    is_model: bool = True,
) -> Traffic:
    announcement = HEADER + CLUSTER * (cluster_NK.shape[1] + want_NM.shape[1])
    if graph.server:
        transfer, copies = _through_server(cluster_NK, want_NM)
        links = len(cluster_NK)
    else:
        transfer, copies, links = _between_neighbours(graph, cluster_NK, want_NM)
    return Traffic(transfer, copies, links, announcement, model_bytes, is_model)


def _between_neighbours(
    graph: Graph, cluster_NK: NDArray[np.int64], want_NM: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int, int]:
    """Return the transfers, the copies by multicast and the number of directed edges."""
    hearer, heard = graph.pairs(range(graph.clients))
    edge = np.stack([heard, hearer])[:, heard != hearer]
    sender, receiver = edge
    wanted_TK = (cluster_NK[sender][:, :, None] == want_NM[receiver][:, None, :]).any(2)
    t, k = np.nonzero(wanted_TK)
    transfer = np.stack([sender[t], receiver[t], cluster_NK[sender[t], k]], axis=1)
    copies = len(np.unique(sender[t] * cluster_NK.shape[1] + k))
    return transfer, copies, edge.shape[1]


def _through_server(
    cluster_NK: NDArray[np.int64], want_NM: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int]:
    """Return the transfers and the copies by multicast: models go up, and wanted means go down."""
    sender, k = np.nonzero(cluster_NK != NOTHING)
    receiver, m = np.nonzero(np.isin(want_NM, cluster_NK))
    up, down = cluster_NK[sender, k], want_NM[receiver, m]
    server_up, server_down = np.full(len(up), SERVER), np.full(len(down), SERVER)
    transfer = np.concatenate(
        [np.stack([sender, server_up, up], axis=1), np.stack([server_down, receiver, down], axis=1)]
    )
    return transfer, len(up) + len(np.unique(down))
