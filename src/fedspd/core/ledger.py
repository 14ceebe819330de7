"""The ledger of one exchange: every model that is sent, by sender, receiver and cluster.

All clients first announce to their neighbours which clusters they offer and want, in a few bytes;
then a model goes only to the neighbours that want its cluster.

Shapes: N clients, K models offered by each, M clusters wanted by each, T transfers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspd.core.graph import Graph

SERVER = -1  # a star's server, where a client's id is expected
NO_CLUSTER = -1  # the cluster of an offer that is not made
HEADER_BYTES = 16  # of an announcement besides the clusters: round and note
CLUSTER_ID_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """What one exchange sends.

    transfer_T3          sender, receiver and cluster of every model, sent point to point
    copies               models sent by multicast, where one sending reaches all neighbours
    announcements        directed edges that an announcement crosses
    announcement_bytes   size of one announcement
    model_bytes          size of one model, or of the few numbers that are sent instead
    is_model             whether the exchange carries models
    """

    transfer_T3: NDArray[np.int64]
    copies: int
    announcements: int
    announcement_bytes: int
    model_bytes: int
    is_model: bool = True

    @property
    def point_to_point_bytes(self) -> int:
        """Bytes sent if every receiver gets its own copy."""
        return len(self.transfer_T3) * self.model_bytes + self._announced_bytes

    @property
    def multicast_bytes(self) -> int:
        """Bytes sent if one sending reaches all neighbours."""
        return self.copies * self.model_bytes + self._announced_bytes

    @property
    def _announced_bytes(self) -> int:
        return self.announcements * self.announcement_bytes

    def as_json(self) -> dict[str, Any]:
        """Return the entry of an event's `traffic`."""
        sent = {"models": self.transfer_T3.tolist()} if self.is_model else {}
        return {
            **sent,
            "transfers": len(self.transfer_T3),
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
    is_model: bool,
) -> Traffic:
    """Return what is sent where clients offer and want these clusters."""
    announcement = HEADER_BYTES + CLUSTER_ID_BYTES * (cluster_NK.shape[1] + want_NM.shape[1])
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
    receiver, sender = graph.pairs(range(graph.clients))
    is_edge = sender != receiver
    receiver, sender = receiver[is_edge], sender[is_edge]
    wanted_TK = (cluster_NK[sender][:, :, None] == want_NM[receiver][:, None, :]).any(2)
    t, k = np.nonzero(wanted_TK & (cluster_NK[sender] != NO_CLUSTER))
    transfer = np.stack([sender[t], receiver[t], cluster_NK[sender[t], k]], axis=1)
    copies = len(np.unique(sender[t] * cluster_NK.shape[1] + k))
    return transfer, copies, len(sender)


def _through_server(
    cluster_NK: NDArray[np.int64], want_NM: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int]:
    """Return the transfers and the copies by multicast: models go up, and wanted means go down."""
    sender, k = np.nonzero(cluster_NK != NO_CLUSTER)
    receiver, m = np.nonzero(np.isin(want_NM, cluster_NK) & (want_NM != NO_CLUSTER))
    up, down = cluster_NK[sender, k], want_NM[receiver, m]
    to_server = np.stack([sender, np.full(len(up), SERVER), up], axis=1)
    from_server = np.stack([np.full(len(down), SERVER), receiver, down], axis=1)
    transfer = np.concatenate([to_server, from_server])
    return transfer, len(up) + len(np.unique(down))
