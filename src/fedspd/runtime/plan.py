"""Everything that a run needs, on any engine and on a peer."""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedspd.core.algorithm import AnyAlgorithm
from fedspd.core.block import Block
from fedspd.core.exchange import ExchangeOptions
from fedspd.core.keys import Key
from fedspd.core.learner import Learner
from fedspd.core.travel import Travel
from fedspd.privacy.accounts import Limit

GroundTruth = list[NDArray[np.int64]]  # per client, the true distribution of every example


@dataclass(frozen=True)
class Plan:
    """A method, a learner, and the examples of a network's clients or of some of them.

    truth           of the training examples, for metrics only: no method sees it
    distributions   the number of true distributions
    test_truth      of the test examples, for metrics only; None where it is unknown
    exchange        how models travel
    validation      examples that are set aside to choose the best round; None: there are none
    metrics         names of the scores beside accuracy
    limit           the privacy budget of every client; None: there is none
    """

    algorithm: AnyAlgorithm
    learner: Learner
    train: Block
    test: Block
    truth: GroundTruth
    distributions: int
    key: Key
    test_truth: GroundTruth | None = None
    exchange: ExchangeOptions = field(default_factory=ExchangeOptions)
    validation: Block | None = None
    metrics: tuple[str, ...] = ()
    limit: Limit | None = None

    def __post_init__(self) -> None:
        self.algorithm.check_learner(self.learner)
        if self.travel is not None:
            method, parts = type(self.algorithm).__name__, self.algorithm.EXCHANGES
            self.travel.check(self.learner, method, parts)

    @cached_property
    def travel(self) -> Travel | None:
        """What travels of a model; None: all of it."""
        return Travel.of(self.learner, self.exchange.only)

    @property
    def travelling_size(self) -> int:
        """The parameters of a model that travel."""
        return self.learner.size if self.travel is None else int(self.travel.travels_P.sum())

    @property
    def clients(self) -> int:
        return len(self.train)

    def select_clients(self, clients: range) -> "Plan":
        """Return the plan of some of the clients, which stay part of the same network."""
        rows = slice(clients.start, clients.stop)

        def own(block: Block) -> Block:
            return dataclasses.replace(
                block, clients=block.clients[rows], x=block.x[rows], y=block.y[rows]
            )

        return dataclasses.replace(
            self,
            train=own(self.train),
            test=own(self.test),
            truth=self.truth[rows],
            test_truth=None if self.test_truth is None else self.test_truth[rows],
            validation=None if self.validation is None else own(self.validation),
        )

    def shrink_to(self, count: int) -> "Plan":
        """Return the plan of a smaller network, which has only the first clients."""
        plan = self.select_clients(range(min(count, self.clients)))
        train, test = (
            dataclasses.replace(block, network_size=plan.clients)
            for block in (plan.train, plan.test)
        )
        return dataclasses.replace(plan, train=train, test=test)
