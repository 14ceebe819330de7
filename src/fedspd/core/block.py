"""The examples of a few clients, stacked or not: what an algorithm may see of the data."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """C clients of a network of N. x[c] and y[c] are client clients[c]'s own examples.

    width is E, the columns of a table over examples: the most that any client of the network has, so that such a table
    looks alike in every block.

    There is no ground truth here: a method cannot read which distribution an example came from.
    """

    clients: Sequence[int]
    network_size: int
    x: Sequence[Tensor]
    y: Sequence[Tensor]
    width: int
    server: bool = False  # whether the network has one

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def counts_C(self) -> Tensor:
        return torch.tensor([len(y) for y in self.y], dtype=torch.long)

    @property
    def present_CE(self) -> Tensor:
        """True where client c has an e-th example."""
        return torch.arange(self.width) < self.counts_C[:, None]
