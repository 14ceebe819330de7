"""The messages of peers, and the interfaces `Transport` and `Handler` between which they travel.

A node announces to its neighbours which models it offers and wants, in a few bytes. A neighbour
fetches the models that it wants. No large message arrives unrequested, so a node's memory is
bounded by its own requests.

Shapes: K models offered, P parameters of a model.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Hello:
    """A heartbeat: the sender is alive, and this is the round it works on."""

    agreement: str  # the hash of everything that peers must have in common
    round: int
    address: str  # where neighbours reach the sender


@dataclass(frozen=True)
class Announcement:
    """An `Exchange` of one round without its models: what a node offers and wants."""

    round: int
    exchange: int  # the index within the round: a method may exchange more than once
    clusters: tuple[int, ...]  # of the K models offered
    weights: tuple[float, ...]  # the number of examples behind each model
    wants: tuple[int, ...]  # clusters
    note: int
    degree: int  # the number of the sender's neighbours


@dataclass(frozen=True)
class Request:
    """A request for the announced models of some clusters.

    With `exchange = JOINING` it asks for the models that a newcomer starts from.
    """

    round: int
    exchange: int
    wants: tuple[int, ...]
    size: int  # P, which both sides know from the exchange
    is_model: bool = False  # models may travel in a shorter data type than other vectors


@dataclass(frozen=True)
class Offer:
    """The models that answer a request, in the order of their announcement."""

    clusters: tuple[int, ...]
    model_KP: Tensor


JOINING = -1


class Handler(Protocol):
    """The node behind a transport, which answers its neighbours.

    The transport has authenticated the sender. A RejectedError that a method raises is sent back.
    """

    def handle_hello(self, sender: str, hello: Hello) -> Hello:
        """Take note of the sender and return this node's own hello."""
        ...

    def handle_announcement(self, sender: str, announcement: Announcement) -> None:
        """Store the announcement until this node reaches the exchange."""
        ...

    def handle_request(self, sender: str, request: Request) -> Offer:
        """Return the requested models."""
        ...

    def handle_mute(self, neighbour: str) -> None:
        """Take note that the transport has muted a neighbour."""
        ...


class Transport(Protocol):
    """The connection of one node to its neighbours.

    Calls raise UnreachableError, RejectedError or MalformedError (core/errors.py).
    """

    async def start(self, handler: Handler) -> None:
        """Start to receive messages for the handler."""
        ...

    async def stop(self) -> None:
        """Stop receiving and close all connections."""
        ...

    async def hello(self, neighbour: str, hello: Hello, timeout_seconds: float) -> Hello:
        """Send a heartbeat and return the neighbour's answer."""
        ...

    async def announce(
        self, neighbour: str, announcement: Announcement, timeout_seconds: float
    ) -> None:
        """Send an announcement."""
        ...

    async def fetch(self, neighbour: str, request: Request, timeout_seconds: float) -> Offer:
        """Return the models that the neighbour sends for the request."""
        ...

    def client_of(self, neighbour: str) -> int:
        """Return the neighbour's client number from the manifest or its certificate."""
        ...

    def is_muted(self, neighbour: str) -> bool:
        """Return whether the neighbour is muted because it sent malformed messages."""
        ...
