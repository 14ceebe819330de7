"""A Byzantine node: it trains as the others do, and sends its models negated and tenfold."""

from fedspd.cli.main import main
from fedspd.node.peer.protocol import ExchangeProtocol
from fedspd.node.wire.messages import Offer, Request

handle_honestly = ExchangeProtocol.handle_request


def handle_request(self: ExchangeProtocol, sender: str, request: Request) -> Offer:
    """Return the requested models, multiplied by -10."""
    offer = handle_honestly(self, sender, request)
    return Offer(offer.clusters, -10 * offer.model_KP)


if __name__ == "__main__":
    ExchangeProtocol.handle_request = handle_request  # type: ignore[method-assign]
    main()
