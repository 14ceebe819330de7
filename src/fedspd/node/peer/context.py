"""Where a node stands in its network."""

from dataclasses import dataclass

from fedspd.core.graph import LinkRule


@dataclass(frozen=True)
class NodeContext:
    name: str
    client: int
    address: str
    neighbours: dict[str, int]  # by name, with their client numbers
    agreement: str  # the hash of all that peers must have in common
    rounds: int
    rule: LinkRule
    evaluate_every: int
    newcomer: bool = False  # it was not there when the network began
