"""Insiders: peers with a valid certificate that train as the others do, and lie to them.

They run on the in-memory transport, beside honest peers of the same process. A lie changes what a
peer says; its own training stays honest, so that it always knows what would be true.
"""

import random
from collections.abc import Mapping
from dataclasses import replace

import torch

from fedspd.core.errors import RejectedError
from fedspd.node.identity.manifest import Manifest
from fedspd.node.peer.inbox import ExchangeId
from fedspd.node.peer.protocol import ExchangeProtocol
from fedspd.node.wire.memory import (
    MemoryNetwork,
    MemoryTransport,
    NetworkConditions,
    ideal_conditions,
)
from fedspd.node.wire.messages import Announcement, Handler, Hello, Offer, Request


class Lie:
    """What an insider says instead of the truth; by default, it says the truth."""

    def hello(self, truth: Hello) -> Hello:
        """Return the heartbeat that the others get."""
        return truth

    def announcement(self, to: str, truth: Announcement) -> Announcement:
        """Return the announcement that a neighbour gets."""
        return truth

    def request(self, truth: Request) -> Request:
        """Return the request that the insider's own honest part answers."""
        return truth

    def offer(self, network: "InsiderNetwork", to: str, request: Request, truth: Offer) -> Offer:
        """Return the models that a neighbour gets."""
        return truth


class SaysRound(Lie):
    """Says that it is in another round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def hello(self, truth: Hello) -> Hello:
        """Return the heartbeat with the other round."""
        return replace(truth, round=self.round)


class SendsModels(Lie):
    """Multiplies its models, in all rounds or in one."""

    def __init__(self, factor: float, only_round: int | None = None) -> None:
        self.factor, self.only_round = factor, only_round

    def offer(self, network: "InsiderNetwork", to: str, request: Request, truth: Offer) -> Offer:
        """Return finite models."""
        if self.only_round not in (None, request.round):
            return truth
        largest = torch.finfo(truth.model_KP.dtype).max / 2
        model_KP = (self.factor * truth.model_KP.double()).clamp(-largest, largest)
        return Offer(truth.clusters, model_KP.to(truth.model_KP))


class OffersNothing(Lie):
    """Announces models and never sends them."""

    def offer(self, network: "InsiderNetwork", to: str, request: Request, truth: Offer) -> Offer:
        """Refuse."""
        raise RejectedError("not now.")


class SaysAnything(Lie):
    """Says anything that its neighbours can decode, and some of what they cannot."""

    def __init__(self, rounds: int, seed: int = 0) -> None:
        self.rounds, self.random = rounds, random.Random(seed)
        self.announced: list[Announcement] = []

    def hello(self, truth: Hello) -> Hello:
        """Return a heartbeat from any round."""
        return replace(truth, round=self.random.randint(0, self.rounds + 1))

    def announcement(self, to: str, truth: Announcement) -> Announcement:
        """Return an earlier announcement, or one with false numbers."""
        choose = self.random.choice
        self.announced.append(truth)
        if self.random.random() < 0.2:
            return choose(self.announced)
        is_elsewhere = self.random.random() < 0.2
        return replace(
            truth,
            round=min(truth.round + is_elsewhere * choose([0, 0, 1]), self.rounds),
            exchange=choose([0, 1]) if is_elsewhere else truth.exchange,
            degree=choose([truth.degree, 0, 2**31 - 1]),
            note=choose([truth.note, 0, -(2**63), 2**63 - 1, self.random.randint(0, 2**55)]),
            weights=tuple(choose([weight, 0.0, 1e-300, 1e308]) for weight in truth.weights),
            clusters=tuple(choose([cluster, -1]) for cluster in truth.clusters),
        )

    def offer(self, network: "InsiderNetwork", to: str, request: Request, truth: Offer) -> Offer:
        """Return models that are wrong, of another size, or not finite."""
        model_KP = self.random.choice([-5.0, 0.0, 1.0, 9.9, 1e6, 3e7]) * truth.model_KP
        if self.random.random() < 0.2:
            model_KP[self.random.randrange(len(model_KP))] = torch.nan
        if self.random.random() < 0.2:
            model_KP = model_KP[:, 1:]
        return Offer(truth.clusters[:: self.random.choice([1, -1])], model_KP)


class InsiderNetwork(MemoryNetwork):
    """A network in which the nodes of `lies` lie."""

    def __init__(
        self, lies: Mapping[str, Lie], conditions: NetworkConditions = ideal_conditions
    ) -> None:
        super().__init__(conditions)
        self.lies = lies

    def transport(self, manifest: Manifest, name: str) -> MemoryTransport:
        """Return the transport of a node."""
        if name in self.lies:
            return InsiderTransport(self, manifest, name, self.lies[name])
        return super().transport(manifest, name)

    def has_parameters(self, request: Request) -> bool:
        """Return whether a request is for models, or bodies or heads of these."""
        exchange_id = ExchangeId(request.round, request.exchange)
        for node in self.nodes.values():
            handler = getattr(node.handler, "truth", node.handler)
            if isinstance(handler, ExchangeProtocol) and exchange_id in handler.offers:
                return handler.offers[exchange_id].has_parameters
        return request.is_model

    def honest_offers(self, request: Request) -> dict[str, Offer]:
        """Return what the honest nodes offer in an exchange; insiders may know all of it."""
        found, exchange_id = {}, ExchangeId(request.round, request.exchange)
        for name, node in self.nodes.items():
            if name not in self.lies and isinstance(node.handler, ExchangeProtocol):
                exchange = node.handler.offers.get(exchange_id)
                if exchange is not None:
                    clusters = tuple(exchange.cluster_CK[0].tolist())
                    found[name] = Offer(clusters, exchange.model_CKP[0])
        return found


class InsiderTransport(MemoryTransport):
    """A transport that lies."""

    network: InsiderNetwork

    def __init__(self, network: InsiderNetwork, manifest: Manifest, name: str, lie: Lie) -> None:
        super().__init__(network, manifest, name)
        self.lie = lie

    async def start(self, handler: Handler) -> None:
        """Receive messages for the handler, and lie in the answers."""
        await super().start(LyingHandler(self, handler))

    async def hello(self, neighbour: str, hello: Hello, timeout_seconds: float) -> Hello:
        """Send a heartbeat."""
        return await super().hello(neighbour, self.lie.hello(hello), timeout_seconds)

    async def announce(
        self, neighbour: str, announcement: Announcement, timeout_seconds: float
    ) -> None:
        """Send an announcement."""
        lie = self.lie.announcement(neighbour, announcement)
        await super().announce(neighbour, lie, timeout_seconds)


class LyingHandler:
    """The handler of an honest peer, whose answers are lies."""

    def __init__(self, transport: InsiderTransport, truth: Handler) -> None:
        self.transport, self.truth = transport, truth

    def handle_hello(self, sender: str, hello: Hello) -> Hello:
        """Answer a heartbeat."""
        return self.transport.lie.hello(self.truth.handle_hello(sender, hello))

    def handle_announcement(self, sender: str, announcement: Announcement) -> None:
        """Receive an announcement."""
        self.truth.handle_announcement(sender, announcement)

    def handle_request(self, sender: str, request: Request) -> Offer:
        """Return false models."""
        truth = self.truth.handle_request(sender, self.transport.lie.request(request))
        return self.transport.lie.offer(self.transport.network, sender, request, truth)

    def handle_mute(self, neighbour: str) -> None:
        """Take note that a neighbour is muted."""
        self.truth.handle_mute(neighbour)
