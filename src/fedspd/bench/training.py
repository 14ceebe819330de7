"""Local training against the plain loop, in one process and in two, and what a second worker gains.

Both train the paper's MNIST CNN on the same random pixels, with the same first model and batches, one thread per process.
Only how dropout draws its mask differs.

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
from fedspd.bench.rows import BenchRow, Contestant, Size, take_turns
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.engines.engine import split_clients
from fedspd.engines.simulator import Simulator
from fedspd.models import PaperCNN
from fedspd.models.dropout import Dropout
from fedspd.runtime.plan import Plan
from fedspd.runtime.processes import Child

SGD = TrainingOptions(
    lr=plain.LR,
    momentum=plain.MOMENTUM,
    batch=plain.BATCH,
    epochs=plain.EPOCHS,
    first_round_factor=1,
)
KEY = Key(0, round=1)
WORKERS = (1, 2)


def rows(size: Size) -> Iterator[BenchRow]:
    data, trained = block(size), size.clients * size.examples * SGD.epochs
    with ExitStack() as stack:
        loops = [
            with_plain_loop(data, workers, stack) for workers in WORKERS
        ]  # first: a fork inherits how memory is kept
        ours = [with_fedspd(data, workers, stack) for workers in WORKERS]
        turns = take_turns([*ours, *loops], size.turns)
    fedspd_1, fedspd_2, plain_1, plain_2 = (
        trained / median(seconds) for seconds in zip(*turns, strict=True)
    )
    what = "local training: examples per second over those of a plain torch loop"
    yield BenchRow.of(
        "training_1",
        f"{what}, one process",
        [p / f for f, _, p, _ in turns],
        1.6,
        True,
        fedspd=fedspd_1,
        plain=plain_1,
    )
    yield BenchRow.of(
        "training_2",
        f"{what}, two processes",
        [p / f for _, f, _, p in turns],
        1.6,
        True,
        fedspd=fedspd_2,
        plain=plain_2,
    )
    gains = [(f1 / f2) / (p1 / p2) for f1, f2, p1, p2 in turns]
    what = "two workers: their gain over one, over that of two plain loops"
    yield BenchRow.of(
        "second_worker",
        what,
        gains,
        0.95,
        True,
        fedspd=fedspd_2 / fedspd_1,
        plain=plain_2 / plain_1,
    )


def block(size: Size) -> Block:
    x_EIHW, y_E = zip(*plain.pixels(size.clients, size.examples), strict=True)
    return Block(range(size.clients), size.clients, x_EIHW, y_E, size.examples)


# ---- fedspd


@dataclass(frozen=True)
class OnlyTrain(Local):
    """A round of local training and nothing else, from the same models every time."""

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        learner.train(state.model_CP, data, key)
        return state
        yield  # a generator that asks for nothing


def with_fedspd(data: Block, workers: int, stack: ExitStack) -> Contestant:
    plan = Plan(OnlyTrain(), Learner(network, SGD), data, data, [], 1, Key(KEY.seed))
    engine = stack.enter_context(closing(Simulator(plan, workers)))
    engine.begin()
    alone = Graph.from_edges(len(data), [])
    return lambda: engine.round(KEY.round, alone).seconds["total"]


def network() -> nn.Module:
    return PaperCNN(plain.SHAPE, plain.CLASSES)


# ---- the plain loop


def with_plain_loop(data: Block, workers: int, stack: ExitStack) -> Contestant:
    blocks = split_clients([len(y) for y in data.y], workers)
    children = [Child("A plain loop", partial(_train_plain, data, clients)) for clients in blocks]
    for child in children:
        stack.enter_context(closing(child))

    def turn() -> float:
        started = time.perf_counter()
        for child in children:
            child.send("go")
        for child in children:
            child.receive()
        return time.perf_counter() - started

    return turn


def _train_plain(data: Block, clients: range, connection: Connection) -> None:
    module = plain.PlainCNN()
    first = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    while connection.recv():
        for client in clients:
            module.load_state_dict(first)
            plain.train(module, data.x[client], data.y[client], KEY.of(client, "order").torch())
        connection.send("done")


# ---- the same work


def difference(size: Size) -> float:
    """The largest difference between the parameters that both find for client 0, in float64 and without dropout:
    rounding, if they do the same work."""
    x_EIHW, y_E = plain.pixels(1, size.examples)[0]
    ours, module = (
        Learner(_without_dropout, SGD, dtype=torch.float64),
        plain.PlainCNN(dropout=0.0).double(),
    )
    first_P = ours.draw(Key(KEY.seed).of("model", 0))
    module.load_state_dict(
        dict(zip(module.state_dict(), ours.export(first_P).values(), strict=True))
    )
    found = ours.export(
        ours.train(first_P[None], Block([0], 1, [x_EIHW], [y_E], size.examples), KEY)[0]
    )
    plain.train(module, x_EIHW.double(), y_E, KEY.of(0, "order").torch())
    pairs = zip(found.values(), module.state_dict().values(), strict=True)
    return max(float((own - other).abs().max()) for own, other in pairs)


def _without_dropout() -> nn.Module:
    built = network()
    for layer in built.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.0
    return built
