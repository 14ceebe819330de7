"""Every method, every engine, and small networks to run them on.

An engine is made of a Plan and has begin, round, finish, measure, save, load, digests and close; another one is another entry of ENGINES.
Shapes: C clients in a block, N clients, K models offered by each, M clusters wanted, P numbers in a model.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspd.algorithms import METHODS
from fedspd.core.block import Block
from fedspd.core.exchange import Exchange, Neighbourhood
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions, cross_entropy, squared_error
from fedspd.core.ledger import NO_CLUSTER, SERVER
from fedspd.engines.simulator import Simulator
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.measures import Measures
from fedspd.runtime.plan import Plan

COUNTS = (6, 1, 9, 4, 6)  # examples of five clients; one has a single one
OPTIONS = {
    "fedspd": {"align_every": 2, "final_epochs": 1},
    "fedavg": {"finetune": 1},
    "pfedme": {"R": 2},
}  # quick, and nothing left out


def own_method() -> Any:
    path = Path(__file__).parents[2] / "examples" / "own_method.py"
    spec = importlib.util.spec_from_file_location("own_method", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CLASSES = {**METHODS, "ditto": own_method().Ditto}

# ---- what is learned: classes by a model with BatchNorm and dropout, or a regression


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3)
    )


def examples(task: str, counts: Sequence[int], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(count, 4, generator=generator) for count in counts]
    classes = [torch.randint(3, (count,), generator=generator) for count in counts]
    return x, classes if task == "classes" else [own[:, :2].double() for own in x]


def learner_of(task: str) -> Learner:
    training = TrainingOptions(batch=4, epochs=2)
    if task == "classes":
        return Learner(classifier, training, cross_entropy)
    return Learner(lambda: nn.Linear(4, 2), training, squared_error, dtype=torch.float64)


def make_plan(
    method: str,
    task: str = "classes",
    counts: Sequence[int] = COUNTS,
    *,
    clusters: int = 2,
    server: bool = False,
    **options: Any,
) -> Plan:
    n = len(counts)
    algorithm = CLASSES[method](clusters=clusters, **{**OPTIONS.get(method, {}), **options})
    train = Block(range(n), n, *examples(task, counts, 0), max(counts), server)
    test = Block(range(n), n, *examples(task, [3] * n, 1), 3, server)
    truth = [np.arange(count) % 2 for count in counts]
    return Plan(algorithm, learner_of(task), train, test, truth, 2, Key(5))


def path(n: int = 5) -> Graph:
    return Graph.from_edges(n, [(i, i + 1) for i in range(n - 1)])


def everyone(n: int = 5, server: bool = False) -> Graph:
    return Graph.from_edges(n, [(i, j) for i in range(n) for j in range(i)], "examples", server)


# ---- an engine that tells a client as little as it may


def part_of(plan: Plan, clients: Sequence[int]) -> Plan:
    train, test = (
        replace(b, clients=clients, x=[b.x[i] for i in clients], y=[b.y[i] for i in clients])
        for b in (plan.train, plan.test)
    )
    return replace(plan, train=train, test=test, truth=[plan.truth[i] for i in clients])


class ByHand:
    """Drives the generators itself. A block hears only its neighbours, and of them only what it wants: all else is NaN or not there."""

    def __init__(self, plan: Plan, blocks: Sequence[Sequence[int]] | None = None) -> None:
        self.runners = [
            BlockRunner(part_of(plan, clients))
            for clients in blocks or [[i] for i in range(plan.clients)]
        ]

    def begin(self) -> None:
        for runner in self.runners:
            runner.begin()

    def round(self, t: int, graph: Graph) -> list[list[tuple[int, int, int]]]:
        """Returns what went from whom to whom, of which cluster, in every exchange."""
        plans = [runner.plan for runner in self.runners]
        turns = [
            plan.algorithm.round(plan.learner, runner.state, plan.train, plan.key.at(t))
            for plan, runner in zip(plans, self.runners, strict=True)
        ]
        asked, sent = [self._advance(i, turn, None) for i, turn in enumerate(turns)], []
        while asked[0] is not None:
            offers = self._in_order(asked)
            sent.append(transfers(graph, offers))
            answers = [told(graph, plan.train.clients, offers) for plan in plans]
            asked = [
                self._advance(i, turn, answer)
                for i, (turn, answer) in enumerate(zip(turns, answers, strict=True))
            ]
        assert asked == [None] * len(asked), "every block asks equally often"
        return sent

    def _advance(self, i: int, turn: Any, answer: Neighbourhood | None) -> Exchange | None:
        try:
            asked: Exchange = turn.send(answer)
            return asked
        except StopIteration as end:
            self.runners[i].state = end.value
            return None

    def _in_order(self, asked: Sequence[Exchange]) -> Exchange:
        clients = [i for runner in self.runners for i in runner.plan.train.clients]
        order = torch.tensor(clients).argsort()
        names = ["cluster_CK", "model_CKP", "weight_CK", "want_CM"] + (
            ["note_C"] if asked[0].note_C is not None else []
        )
        return Exchange(
            **{name: torch.cat([getattr(one, name) for one in asked])[order] for name in names}
        )

    def finish(self, t: int) -> None:
        for runner in self.runners:
            runner.finish(t)

    def measure(self) -> Measures:
        return Measures.merge([runner.measure() for runner in self.runners])

    def save(self, folder: Path) -> None:
        for runner in self.runners:
            runner.save(folder)

    def load(self, folder: Path) -> None:
        for runner in self.runners:
            runner.load(folder)

    def digests(self) -> list[str]:
        found = {
            i: digest
            for r in self.runners
            for i, digest in zip(r.plan.train.clients, r.digests(), strict=True)
        }
        return [found[i] for i in sorted(found)]

    def close(self) -> None:
        pass


def told(graph: Graph, clients: Sequence[int], offers: Exchange) -> Neighbourhood:
    around = np.unique(np.concatenate([graph.closed(i) for i in clients]))
    wanted = torch.isin(offers.cluster_CK[around], offers.want_CM[list(clients)])
    own = torch.from_numpy(np.isin(around, clients))[:, None]
    model_CKP = torch.where((wanted | own)[:, :, None], offers.model_CKP[around], torch.nan)
    note = None if offers.note_C is None else offers.note_C[around]
    spoken = Exchange(
        offers.cluster_CK[around], model_CKP, offers.weight_CK[around], offers.want_CM[around], note
    )
    return Neighbourhood.of(graph, clients, spoken, around)


def transfers(graph: Graph, offers: Exchange) -> list[tuple[int, int, int]]:
    """Counted from the definition, one by one: a model goes to each neighbour that wants its cluster; on a star up, and its mean down."""
    offered, wants = offers.cluster_CK.tolist(), offers.want_CM.tolist()
    if graph.server:
        up = [(i, SERVER, s) for i, row in enumerate(offered) for s in row if s != NO_CLUSTER]
        return up + [
            (SERVER, i, s)
            for i, row in enumerate(wants)
            for s in row
            if any(s == made for _, _, made in up)
        ]
    return [
        (i, int(j), s)
        for i, row in enumerate(offered)
        for j in graph.neighbours(i)
        for s in row
        if s in wants[j]
    ]


ENGINES: dict[str, Callable[[Plan], Any]] = {
    "in-process": Simulator,
    "2-workers": partial(Simulator, workers=2),
    "by-hand": ByHand,
}


# ---- runs


def run(engine: Any, graph: Graph, last: int, first: int = 1) -> Any:
    if first == 1:
        engine.begin()
    for t in range(first, last + 1):
        engine.round(t, graph)
    return engine


@cache
def reference(method: str, task: str, rounds: int = 4) -> tuple[str, ...]:
    """The digests of the five clients on a path: rounds without interruption in this process, and the final phase."""
    engine = run(Simulator(make_plan(method, task)), path(), rounds)
    engine.finish(rounds + 1)
    return tuple(engine.digests())


class Lab:
    """What the tests of the contract have at hand."""

    plan, path, everyone, run, reference = map(
        staticmethod, (make_plan, path, everyone, run, reference)
    )
    classes, by_hand, part_of, learner_of, examples = (
        CLASSES,
        ByHand,
        staticmethod(part_of),
        staticmethod(learner_of),
        staticmethod(examples),
    )


@pytest.fixture
def lab() -> type[Lab]:
    return Lab


@pytest.fixture(params=CLASSES)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["classes", "regression"])
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Callable[[Plan], Any]]:
    yield from closing(request)


@pytest.fixture(params=[name for name in ENGINES if name != "by-hand"])
def recording_engine(request: pytest.FixtureRequest) -> Iterator[Callable[[Plan], Any]]:
    """One that reports its traffic."""
    yield from closing(request)


def closing(request: pytest.FixtureRequest) -> Iterator[Callable[[Plan], Any]]:
    """Makes engines, and closes them."""
    made: list[Any] = []

    def make(plan: Plan) -> Any:
        made.append(ENGINES[request.param](plan))
        return made[-1]

    yield make
    for one in made:
        one.close()
