"""Everything that a run needs, whichever engine or peer runs it."""

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedspd.core.algorithm import AnyAlgorithm
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner

Truth = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Plan:
    """All that a run needs, whoever runs it. Truth is for metrics: no algorithm sees it."""

    algorithm: AnyAlgorithm
    learner: Learner
    train: Block
    test: Block
    truth: Truth
    distributions: int
    key: Key

    @property
    def clients(self) -> int:
        return len(self.train)

    def first(self, count: int) -> "Plan":
        """A small network of the first clients alone."""
        part = self.part(range(min(count, self.clients)))
        train, test = (
            dataclasses.replace(block, network_size=len(part.train))
            for block in (part.train, part.test)
        )
        return dataclasses.replace(part, train=train, test=test)

    def part(self, clients: range) -> "Plan":
        """The same plan for some of the clients."""
        rows = slice(clients.start, clients.stop)
        train, test = (
            dataclasses.replace(b, clients=b.clients[rows], x=b.x[rows], y=b.y[rows])
            for b in (self.train, self.test)
        )
        return dataclasses.replace(self, train=train, test=test, truth=self.truth[rows])
