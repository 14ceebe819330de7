"""The privacy ledger of a simulation: what each client has released, and who has received it.

A model contains all private steps before it. So a neighbour that received one in round t knows of
every release of its sender up to round t, also of those in rounds that were not sent to it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspd.core.errors import StorageError
from fedspd.core.graph import Graph
from fedspd.core.ledger import SERVER, Traffic
from fedspd.core.mechanism import Release
from fedspd.privacy.accountant import epsilon

Json = dict[str, Any]
Pair = tuple[int, int]  # sender, receiver


class RunLedger:
    """Every client's releases, and how many of them each neighbour has received."""

    def __init__(self, clients: int, delta: float) -> None:
        self.clients, self.delta = clients, delta
        self.restore(())

    def restore(self, events: Iterable[Json]) -> None:
        """Make this the ledger of these events."""
        self.releases: list[list[Release]] = [[] for _ in range(self.clients)]
        self.received: dict[Pair, int] = {}  # the sender's first releases that the receiver knows
        self.sent = [0] * self.clients  # the first releases that anyone knows
        self.silent: dict[int, int] = {}  # clients that send nothing more: the releases before
        for event in events:
            if "privacy" in event:
                self.record(event["privacy"])

    def record(self, entry: Json) -> None:
        """Add the entry of a round's event; refuse one that lacks a part."""
        try:
            self._record(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"events.jsonl: the field 'privacy' of a round is not complete ({error!r}); an "
                "older version has written it, or it is damaged. Start a new run."
            ) from None

    def _record(self, entry: Json) -> None:
        for release in entry["releases"]:
            own = Release(release["noise"], release["rate"], release["times"])
            for client in range(self.clients) if release["clients"] is None else release["clients"]:
                self.releases[client].append(own)
        self.silent |= dict(map(tuple, entry.get("silent", ())))
        for sender, receiver in entry["received"]:
            known = self.silent.get(sender, len(self.releases[sender]))
            self.received[sender, receiver] = self.sent[sender] = known

    def add_round(self, entry: Json) -> Json:
        """Add a round, and return its entry with every client's epsilon against all neighbours."""
        self.record(entry)
        return {**entry, "epsilon": [round(self.against_all(c), 6) for c in range(self.clients)]}

    def against_all(self, client: int) -> float:
        """Return the epsilon of a client against all others together."""
        return self._epsilon(client, self.sent[client])

    def against(self, client: int, neighbour: int) -> float:
        """Return the epsilon of a client against one neighbour alone."""
        return self._epsilon(client, self.received.get((client, neighbour), 0))

    def _epsilon(self, client: int, known: int) -> float:
        return epsilon(self.releases[client][:known], self.delta)

    def as_json(self) -> Json:
        """Return the epsilon of every client against all, and against each neighbour."""
        pairs = sorted(self.received)
        return {
            "delta": self.delta,
            "all": [round(self.against_all(c), 6) for c in range(self.clients)],
            "neighbours": [[i, j, round(self.against(i, j), 6)] for i, j in pairs],
            "silent": sorted(self.silent),
        }


def round_entry(
    releases: dict[int, list[Release]],
    traffic: Sequence[Traffic],
    graph: Graph,
    is_public: bool,
    silent: Mapping[int, int] = MappingProxyType({}),
    was_silent: Collection[int] = (),
) -> Json:
    """Return what a round released and who received it.

    is_public    whether announcements follow from public things alone; if not, they count as models
    silent       clients whose budget is spent after the round, and the releases before
    was_silent   those whose budget was spent before the round: they told nothing
    """
    received = _receivers(traffic, graph, is_public)
    told = np.compress(~np.isin(received[:, 0], list(was_silent)), received, axis=0)
    return {
        "releases": _merge(releases, graph.clients),
        "received": told.tolist(),
        **({"silent": sorted(silent.items())} if silent else {}),
    }


def newcomers_entry(graph: Graph, clients: int, silent: Collection[int]) -> Json:
    """Return the entry of newcomers, whose edges the graph has: each received what clients share.

    silent   clients whose budget is spent: they share nothing
    """
    links = _links(graph)
    shares = (links[:, 0] < clients) & ~np.isin(links[:, 0], list(silent))
    return {"releases": [], "received": np.compress(shares, links, axis=0).tolist()}


def _merge(releases: dict[int, list[Release]], clients: int) -> list[Json]:
    """Return the releases, with the clients that made each; None: all of them."""
    makers: dict[tuple[int, Release], list[int]] = defaultdict(list)
    for client in sorted(releases):
        for position, release in enumerate(releases[client]):
            makers[position, release].append(client)
    return [
        {"clients": None if len(own) == clients else own, **release._asdict()}
        for (_, release), own in sorted(makers.items(), key=lambda item: item[0][0])
    ]


def _receivers(traffic: Sequence[Traffic], graph: Graph, is_public: bool) -> NDArray[np.int64]:
    """Return the pairs of a sender and a receiver that knows of its releases of this round."""
    pairs: list[NDArray[np.int64]] = [np.zeros((0, 2), np.int64)]
    if traffic and not is_public:
        pairs.append(_links(graph))
    for sent in traffic:
        pairs.append(sent.transfer_T3[:, :2])
    found: NDArray[np.int64] = np.unique(np.concatenate(pairs), axis=0)
    return np.compress(
        found[:, 0] != SERVER, found, axis=0
    )  # a server only passes on what it has received


def _links(graph: Graph) -> NDArray[np.int64]:
    """Return all pairs of a client and one of its neighbours, or the server."""
    if graph.server:
        every = np.arange(graph.clients)
        return np.stack([every, np.full_like(every, SERVER)], 1)
    receiver, sender = graph.pairs(range(graph.clients))
    return np.compress(sender != receiver, np.stack([sender, receiver], 1), axis=0)
