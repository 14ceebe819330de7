"""What may protect a client's examples: every local update then goes through a mechanism.

Shapes: C clients, S clusters, E examples, P parameters of a model.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from fedspd.core.block import Block
from fedspd.core.keys import Key

if TYPE_CHECKING:
    from fedspd.core.learner import Learner, LocalUpdate


class Release(NamedTuple):
    """Sums over examples, with Gaussian noise: what a mechanism lets out of a client's data.

    noise   standard deviation of the noise, relative to what one unit can change in the sum
    rate    the chance of an example to be in the sum
    times   the number of such sums
    """

    noise: float
    rate: float
    times: int


class Mechanism(ABC):
    """The only way from a client's examples to a model that it offers.

    Both steps add their releases to `learner.effort.releases`, by client.
    """

    @abstractmethod
    def train(
        self,
        learner: "Learner",
        model_CP: Tensor,
        updates: Sequence["LocalUpdate"],
        clients: Sequence[int],
        key: Key,
    ) -> Tensor:
        """Return every client's model after its local update; buffers stay as they are."""

    @abstractmethod
    def mean_shares(
        self, learner: "Learner", share_CSE: Tensor, before_CS: Tensor, data: Block, key: Key
    ) -> Tensor:
        """Return the mean over each client's examples of shares that sum to 1, or before_CS."""

    @abstractmethod
    def part_cost(
        self, parts: Sequence[Sequence[Release]], own: Sequence[Release]
    ) -> list[Release]:
        """Return what a local update adds to the cost of those on other, disjoint examples."""

    @abstractmethod
    def own_key(self, key: Key) -> Key:
        """Return the key of draws that go example by example, such as the first assignment.

        Such draws shift where an example is missing. At a node nobody else may know them.
        """
