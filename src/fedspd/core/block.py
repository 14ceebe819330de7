"""The examples of a block of clients: what a method may see of the data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedspd.core.keys import Key


@dataclass(frozen=True)
class Block:
    """C clients of a network, each with its own training or test examples.

    clients        ids of the clients, which name their draws
    network_size   N, the clients of the whole network
    x, y           x[c] and y[c] are the examples and targets of client clients[c]
    width          E, the most examples of any client of the network, so that a table over examples
                   has the same shape in every block
    server         whether the network has a server (a star)
    rounds         T, the rounds of the run
    diameter       a bound on the hops between two clients in round 1

    There is no ground truth here: a method cannot read which distribution an example came from.
    """

    clients: Sequence[int]
    network_size: int
    x: Sequence[Tensor]
    y: Sequence[Tensor]
    width: int
    server: bool = False
    rounds: int = 0
    diameter: int = 0

    def select(self, rows: Sequence[int]) -> "Block":
        """Return the block of some of the clients."""
        clients, x, y = (
            [self.clients[c] for c in rows],
            [self.x[c] for c in rows],
            [self.y[c] for c in rows],
        )
        return replace(self, clients=clients, x=x, y=y)

    def random_folds(self, folds: int, key: Key) -> Tensor:
        """Return fold_CE, a random fold for each example; fold 0 is the largest, by at most one."""
        fold_CE = torch.zeros(len(self), self.width, dtype=torch.long)
        for c, (client, count) in enumerate(zip(self.clients, self.counts_C.tolist(), strict=True)):
            order = torch.randperm(count, generator=key.of(client).torch())
            fold = folds - 1 - (torch.arange(1, count + 1) * folds - 1) // max(count, 1)
            fold_CE[c, order] = fold
        return fold_CE

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def counts_C(self) -> Tensor:
        """The number of examples of every client."""
        return torch.tensor([len(y) for y in self.y], dtype=torch.long)

    @property
    def present_CE(self) -> Tensor:
        """Whether client c has an e-th example."""
        return torch.arange(self.width) < self.counts_C[:, None]
