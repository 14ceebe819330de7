"""What peers say to one another, whoever carries it: the wire, or a dictionary in a test.

A node tells its neighbours what it offers and wants (a few bytes); a neighbour that wants some of it fetches just that. So
nothing large ever arrives that was not asked for, and a node's memory is bounded by what it asks.

Shapes: K models offered, P numbers in a model.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Hello:
    """Who is there, and how far. The agreement is the hash of all that peers must have in common."""

    agreement: str
    round: int  # the round that the node works on
    address: str  # where it can be called


@dataclass(frozen=True)
class Announcement:
    """What a node offers and wants in one exchange of one round: an Exchange without its models."""

    round: int
    exchange: int  # a method may ask more than once in a round
    clusters: tuple[int, ...]  # of the K models offered
    weights: tuple[float, ...]  # the examples behind each
    wants: tuple[int, ...]
    note: int
    degree: int  # how many neighbours the node has


@dataclass(frozen=True)
class Request:
    """The models of these clusters that were announced; exchange -1: what a newcomer may have."""

    round: int
    exchange: int
    wants: tuple[int, ...]
    size: int  # P of the models, which the one that asks knows: a whole model, or a few numbers


@dataclass(frozen=True)
class Offer:
    """The models that answer a request, in the order in which they were announced."""

    clusters: tuple[int, ...]
    model_KP: Tensor


JOINING = -1  # the exchange of a newcomer's request


class Handler(Protocol):
    """The node behind a transport. The sender is whoever the certificate names; it has been checked before.

    A RejectedError that it raises travels to the one that asked.
    """

    def hello(self, sender: str, said: Hello) -> Hello: ...

    def announced(self, sender: str, announcement: Announcement) -> None: ...

    def offered(self, sender: str, request: Request) -> Offer: ...


class Transport(Protocol):
    """Calls raise UnreachableError, RejectedError or MalformedError (core/errors.py); each has a time limit in seconds."""

    async def start(self, handler: Handler) -> None: ...

    async def hello(self, neighbour: str, said: Hello, limit: float) -> Hello: ...

    async def announce(self, neighbour: str, announcement: Announcement, limit: float) -> None: ...

    async def fetch(self, neighbour: str, request: Request, limit: float) -> Offer: ...

    async def stop(self) -> None: ...

    def client(self, neighbour: str) -> int:
        """The client number of a neighbour, by the manifest or its certificate."""
        ...

    def muted(self, neighbour: str) -> bool:
        """Whether the neighbour has sent so much rubbish that it is not listened to for a while."""
        ...
