"""A node that trains like the others, and gives its neighbours ten times the opposite of its models."""

from fedspd.cli.main import main
from fedspd.node.peer.protocol import ExchangeProtocol
from fedspd.node.wire.messages import Offer, Request

honest = ExchangeProtocol.handle_request


def dishonest(self: ExchangeProtocol, sender: str, request: Request) -> Offer:
    offer = honest(self, sender, request)
    return Offer(offer.clusters, -10 * offer.model_KP)


if __name__ == "__main__":
    ExchangeProtocol.handle_request = dishonest  # type: ignore[method-assign]
    main()
