"""Benchmarks of local training: fedspd and a plain torch loop, in one process and in two.

Both train the paper's MNIST CNN on the same random pixels, with the same first model and batches,
and one thread per process. Only dropout draws its mask differently.

Shapes: E examples of a client, I channels, H height, W width.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median

import torch
from torch import nn

from fedspd.algorithms.local import Local, State
from fedspd.bench import plain
from fedspd.bench.results import BenchmarkResult, BenchmarkSize, TimedTask, time_in_turns
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.flat_module import Factory
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.engines.engine import split_clients
from fedspd.engines.simulator import Simulator
from fedspd.models import PaperCNN
from fedspd.models.dropout import Dropout
from fedspd.runtime.plan import Plan
from fedspd.runtime.processes import Child

TRAINING = TrainingOptions(
    lr=plain.LR,
    momentum=plain.MOMENTUM,
    batch=plain.BATCH,
    epochs=plain.EPOCHS,
    first_round_factor=1,
)
KEY = Key(0, round=1)
WORKERS = (1, 2)


def measure_training(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare the speed of local training, and the gain by a second process."""
    data = make_block(size)
    with ExitStack() as stack:
        # The plain loops start first: a fork inherits how its parent keeps freed memory.
        loops = [plain_loop(data, workers, stack) for workers in WORKERS]
        rounds = [fedspd_round(data, workers, stack) for workers in WORKERS]
        turns = time_in_turns([*rounds, *loops], size.turns)
    examples = size.clients * size.examples * TRAINING.epochs
    fedspd_1, fedspd_2, plain_1, plain_2 = (
        examples / median(seconds) for seconds in zip(*turns, strict=True)
    )
    what = "local training: examples per second over those of a plain torch loop"
    yield BenchmarkResult.from_turns(
        "training_1",
        f"{what}, one process",
        [p1 / f1 for f1, _, p1, _ in turns],
        1.6,
        at_least=True,
        fedspd=fedspd_1,
        plain=plain_1,
    )
    yield BenchmarkResult.from_turns(
        "training_2",
        f"{what}, two processes",
        [p2 / f2 for _, f2, _, p2 in turns],
        1.6,
        at_least=True,
        fedspd=fedspd_2,
        plain=plain_2,
    )
    yield BenchmarkResult.from_turns(
        "second_worker",
        "speed-up by a second worker over that by a second plain loop",
        [(f1 / f2) / (p1 / p2) for f1, f2, p1, p2 in turns],
        0.95,
        at_least=True,
        fedspd=fedspd_2 / fedspd_1,
        plain=plain_2 / plain_1,
    )


def make_block(size: BenchmarkSize) -> Block:
    """Return all clients with random pixels."""
    x_EIHW, y_E = zip(*plain.pixels(size.clients, size.examples), strict=True)
    return Block(range(size.clients), size.clients, x_EIHW, y_E, size.examples)


# ---- fedspd


@dataclass(frozen=True)
class TrainOnly(Local):
    """A method whose round is local training from the same models every time."""

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        learner.train(state.model_CP, data, key)
        return state
        yield  # makes this a generator, which asks for nothing


def fedspd_round(data: Block, workers: int, stack: ExitStack) -> TimedTask:
    """Return a task that trains all clients with fedspd's simulator."""
    plan = Plan(TrainOnly(), Learner(build_cnn, TRAINING), data, data, [], 1, Key(KEY.seed))
    engine = stack.enter_context(closing(Simulator(plan, workers)))
    engine.begin()
    empty = Graph.from_edges(len(data), [])
    return lambda: engine.round(KEY.round, empty).seconds["total"]


def build_cnn() -> nn.Module:
    """Return fedspd's CNN for MNIST."""
    return PaperCNN(plain.SHAPE, plain.CLASSES)


# ---- the plain loop


def plain_loop(
    data: Block,
    workers: int,
    stack: ExitStack,
    factory: Factory = plain.PlainCNN,
    batch: int = plain.BATCH,
) -> TimedTask:
    """Return a task that trains all clients with plain loops in this many processes."""
    blocks = split_clients([len(y) for y in data.y], workers)
    works = [partial(_train_plain, data, factory, batch, clients) for clients in blocks]
    children = [Child("A plain loop", work) for work in works]
    for child in children:
        stack.enter_context(closing(child))

    def train() -> float:
        started = time.perf_counter()
        for child in children:
            child.send("go")
        for child in children:
            child.receive()
        return time.perf_counter() - started

    return train


def _train_plain(
    data: Block, factory: Factory, batch: int, clients: range, connection: Connection
) -> None:
    module = factory()
    first = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    while connection.recv():
        for client in clients:
            module.load_state_dict(first)
            order = KEY.of(client, "order").torch()
            plain.train(module, data.x[client], data.y[client], order, batch)
        connection.send("done")


# ---- the same work


def measure_difference(size: BenchmarkSize) -> float:
    """Return the largest difference between the parameters that both find for client 0.

    In float64 and without dropout it is a rounding error if both do the same work.
    """
    x_EIHW, y_E = plain.pixels(1, size.examples)[0]
    learner = Learner(_build_without_dropout, TRAINING, dtype=torch.float64)
    module = plain.PlainCNN(dropout=0.0).double()
    first_P = learner.draw(Key(KEY.seed).of("model", 0))
    first = learner.export(first_P).values()
    module.load_state_dict(dict(zip(module.state_dict(), first, strict=True)))
    client = Block([0], 1, [x_EIHW], [y_E], size.examples)
    trained = learner.export(learner.train(first_P[None], client, KEY)[0])
    plain.train(module, x_EIHW.double(), y_E, KEY.of(0, "order").torch())
    pairs = zip(trained.values(), module.state_dict().values(), strict=True)
    return max(float((own - other).abs().max()) for own, other in pairs)


def _build_without_dropout() -> nn.Module:
    module = build_cnn()
    for layer in module.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.0
    return module
