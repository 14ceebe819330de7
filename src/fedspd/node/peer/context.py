"""The position of a node in its network."""

from dataclasses import dataclass

from fedspd.core.graph import LinkRule


@dataclass(frozen=True)
class NodeContext:
    """The part of a node's bundle that its rounds need."""

    name: str
    client: int
    address: str
    neighbours: dict[str, int]  # client numbers by name
    agreement: str  # hash of all settings that peers must have in common
    rounds: int
    rule: LinkRule
    evaluate_every: int  # rounds
    clients: int = 0  # when the network was created; a newcomer has a higher number
    is_newcomer: bool = False
