"""Small networks to try a method on.

Shapes: E examples, C clients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspd.core.algorithm import Algorithm, AnyAlgorithm, check_method_class
from fedspd.core.block import Block
from fedspd.core.errors import MethodError
from fedspd.core.exchange import ExchangeOptions
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.core.losses import cross_entropy, squared_error
from fedspd.core.mechanism import Mechanism
from fedspd.engines.simulator import Simulator
from fedspd.runtime.plan import Plan

TASKS = ("classes", "regression")
COUNTS = (6, 1, 9, 4, 6)  # examples of five clients; client 1 has a single one
CLASSES, FEATURES, VALUES = 3, 4, 2
ROUNDS = 4  # of a reference run


@dataclass(frozen=True)
class Subject:
    """A method under test: its class, the number of clusters and its other options.

    With a mechanism, which protects the examples, the classifier has no BatchNorm. `model` makes
    another model with so many outputs, and `exchange` says how its parameters travel.
    """

    method: Callable[..., AnyAlgorithm]
    clusters: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    mechanism: Mechanism | None = None
    model: Callable[[int], nn.Module] | None = None
    exchange: ExchangeOptions = field(default_factory=ExchangeOptions)
    _references: dict[str, list[str]] = field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self.algorithm()).__name__

    @property
    def has_newcomers(self) -> bool:
        """Whether clients can join after training."""
        cls = type(self.algorithm())
        return cls.share is not Algorithm.share and cls.join is not Algorithm.join

    def algorithm(self, **changes: Any) -> AnyAlgorithm:
        """Return the method, with changed options."""
        if isinstance(self.method, type):
            check_method_class(self.method.__name__, self.method, has_newcomers=False)
        return self.method(**{"clusters": self.clusters, **self.options, **changes})

    def plan(
        self,
        task: str = "classes",
        counts: Sequence[int] = COUNTS,
        *,
        server: bool = False,
        seed: int = 5,
        **changes: Any,
    ) -> Plan:
        """Return the plan of a network whose clients have these numbers of examples."""
        n = len(counts)
        hops = 1 if server else n  # more than the longest path of n clients
        train = Block(range(n), n, *make_examples(task, counts, 0), max(counts), server)
        train = replace(train, rounds=ROUNDS, diameter=hops)
        test = Block(range(n), n, *make_examples(task, [3] * n, 1), 3, server)
        truth = [np.arange(count) % 2 for count in counts]
        algorithm = self.algorithm(**changes)
        test_truth = [np.arange(3) % 2 for _ in counts]
        learner = make_learner(task, self.mechanism, self.model)
        about = 2, Key(seed), test_truth, self.exchange
        return Plan(algorithm, learner, train, test, truth, *about)

    def reference(self, task: str = "classes") -> list[str]:
        """Return the digests of the clients on a path after ROUNDS rounds and the final phase."""
        if task not in self._references:
            self._references[task] = run(Simulator(self.plan(task)), path_graph())
        return self._references[task]

    def require(self, condition: bool, sentence: str) -> None:
        """Raise MethodError unless the condition holds."""
        if not condition:
            raise MethodError(f"{self.name}: {sentence}")


def run(engine: Any, graph: Graph, first: int = 1, last: int = ROUNDS) -> list[str]:
    """Run rounds and the final phase; return the digests. Round 1 begins a new run."""
    run_rounds(engine, graph, first, last)
    engine.finish(last + 1)
    found: list[str] = engine.digests()
    return found


def run_rounds(engine: Any, graph: Graph, first: int, last: int) -> Any:
    """Run rounds and return the engine. Round 1 begins a new run."""
    if first == 1:
        engine.begin()
    for t in range(first, last + 1):
        engine.round(t, graph)
    return engine


def path_graph() -> Graph:
    """Return the path of all clients: 0 - 1 - 2 - 3 - 4."""
    return Graph.from_edges(5, [(i, i + 1) for i in range(4)])


def select_clients(plan: Plan, clients: Sequence[int]) -> Plan:
    """Return the plan of some clients, in any order."""
    train, test = (
        replace(b, clients=clients, x=[b.x[i] for i in clients], y=[b.y[i] for i in clients])
        for b in (plan.train, plan.test)
    )
    truth = [plan.truth[i] for i in clients]
    test_truth = plan.test_truth and [plan.test_truth[i] for i in clients]
    return replace(plan, train=train, test=test, truth=truth, test_truth=test_truth)


def make_learner(
    task: str,
    mechanism: Mechanism | None = None,
    model: Callable[[int], nn.Module] | None = None,
) -> Learner:
    """Return a classifier with BatchNorm, or a dense regression in float64, both with dropout.

    The clients of a block train one after another with BatchNorm, and together without.
    """
    training = TrainingOptions(batch=4, epochs=2)
    factory: Callable[[], nn.Module]
    if task == "classes":
        factory = _classifier if mechanism is None else partial(_classifier, nn.Identity)
        factory = factory if model is None else partial(model, CLASSES)
        return Learner(factory, training, cross_entropy, mechanism=mechanism)
    factory = _regression if model is None else partial(model, VALUES)
    dtype = torch.float64
    return Learner(factory, training, squared_error, dtype=dtype, mechanism=mechanism)


def _classifier(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Module:
    hidden = [nn.Linear(FEATURES, 6), norm(6), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*hidden, nn.Linear(6, CLASSES))


def _regression() -> nn.Module:
    hidden = [nn.Linear(FEATURES, 5), nn.Tanh(), nn.Dropout(0.25)]
    return nn.Sequential(*hidden, nn.Linear(5, VALUES))


def make_examples(task: str, counts: Sequence[int], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return random examples and targets of clients with these numbers of examples."""
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(count, FEATURES, generator=generator) for count in counts]
    classes = [torch.randint(CLASSES, (count,), generator=generator) for count in counts]
    return x, classes if task == "classes" else [own[:, :VALUES].double() for own in x]
