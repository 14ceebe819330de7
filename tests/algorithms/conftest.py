"""A whole network in one process, and the small problems that it solves.

Shapes: C clients, S clusters, P parameters of a model, E examples.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedspd.core.block import Block
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions, squared_error
from fedspd.engines.simulator import Simulator
from fedspd.runtime.plan import Plan

PLAIN = TrainingOptions(
    lr=0.1, momentum=0, batch=1000, epochs=1, first_round_factor=1, decay=1
)  # one step of plain gradient descent per round


class Network:
    """A method, the examples of all clients and a graph.

    The model is y = w . x in float64, unless another one is given.
    """

    def __init__(
        self,
        algorithm: Any,
        x: list[Tensor],
        y: list[Tensor],
        graph: Graph,
        *,
        training: TrainingOptions = PLAIN,
        seed: int = 0,
        **learner: Any,
    ):
        options = {
            "factory": lambda: nn.Linear(x[0].shape[1], 1, bias=False),
            "loss": squared_error,
            "dtype": torch.float64,
        }
        self.algorithm, self.graph, self.key = algorithm, graph, Key(seed)
        self.learner = Learner(training=training, **{**options, **learner})
        self.data = Block(range(len(y)), len(y), x, y, max(len(own) for own in y), graph.server)
        self.simulator = Simulator(
            Plan(algorithm, self.learner, self.data, self.data, [], 0, self.key)
        )
        self.simulator.begin()

    @property
    def state(self) -> Any:
        return self.simulator.block.state

    @state.setter
    def state(self, state: Any) -> None:
        self.simulator.block.state = state

    def run(self, last: int, first: int = 1) -> "Network":
        for t in range(first, last + 1):
            self.simulator.round(t, self.graph)
        return self

    def finish(self, t: int = 1) -> "Network":
        self.simulator.finish(t)
        return self

    def chosen(self, t: int) -> Tensor:
        """The clusters that the clients will choose in round t, the next one."""
        return self.algorithm.choose(self.state, self.data, self.key.at(t))


@pytest.fixture
def network() -> type[Network]:
    return Network


@pytest.fixture
def ring() -> Graph:
    return Graph.from_edges(6, [(i, (i + 1) % 6) for i in range(6)])
