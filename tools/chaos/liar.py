"""A node that trains like the others, and gives its neighbours ten times the opposite of its models."""

from fedspd.cli.main import main
from fedspd.node.conversation import Conversation
from fedspd.node.transport import Offer, Request

honest = Conversation.offered


def dishonest(self: Conversation, sender: str, request: Request) -> Offer:
    offer = honest(self, sender, request)
    return Offer(offer.clusters, -10 * offer.model_KP)


if __name__ == "__main__":
    Conversation.offered = dishonest  # type: ignore[method-assign]
    main()
