"""Examples per second of local training: fedspd against a plain torch loop over the same batches.

    python benchmarks/training.py           about two minutes on two cores
    python benchmarks/training.py --quick   a few seconds, whose numbers mean little
    python benchmarks/training.py --json    one line of JSON instead of the table

Both train the paper's MNIST CNN on the same random pixels, with the same first model, batches, dropout and momentum, in the
same number of processes with one thread each. They take turns, so that whatever else the machine does meets both.

Shapes: E examples of a client, I channels, H height, W width.
"""

import json
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from fedspd.algorithms.local import Local, State
from fedspd.core.algorithm import Round
from fedspd.core.block import Block
from fedspd.core.graph import Graph
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, Sgd
from fedspd.engines.block import Plan
from fedspd.engines.simulator import Simulator, balanced
from fedspd.models import PaperCNN

SHAPE, CLASSES = (1, 28, 28), 10
SGD = Sgd(first_round=1)
KEY = Key(0, round=1)
TARGET = 0.85
WORKERS = (1, 2)

Contestant = Callable[[], float]  # trains every client once and says how many seconds passed


@dataclass(frozen=True)
class Workload:
    clients: int
    examples: int
    repeats: int

    @property
    def trained(self) -> int:
        """Examples that one turn trains on."""
        return self.clients * self.examples * SGD.epochs

    def block(self) -> Block:
        generator = KEY.of("pixels").torch()
        x_EIHW = [torch.rand(self.examples, *SHAPE, generator=generator) * 2 - 1 for _ in range(self.clients)]
        y_E = [torch.randint(CLASSES, (self.examples,), generator=generator) for _ in range(self.clients)]
        return Block(range(self.clients), self.clients, x_EIHW, y_E, self.examples)


FULL = Workload(clients=20, examples=300, repeats=5)
QUICK = Workload(clients=4, examples=50, repeats=1)


def model() -> nn.Module:
    return PaperCNN(SHAPE, CLASSES)


# ---- fedspd


@dataclass(frozen=True)
class OnlyTrain(Local):
    """A round of local training and nothing else, from the same models every time."""

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        learner.train(state.model_CP, data, key)
        return state
        yield  # a generator that asks for nothing


def with_fedspd(data: Block, workers: int, stack: ExitStack) -> Contestant:
    plan = Plan(OnlyTrain(), Learner(model, SGD), data, data, [], 1, Key(KEY.seed))
    engine = stack.enter_context(closing(Simulator(plan, workers)))
    engine.begin()
    alone = Graph.from_edges(len(data), [])
    return lambda: engine.round(KEY.round, alone).seconds["total"]


# ---- the plain loop


def train_plainly(module: nn.Module, data: Block, client: int) -> None:
    x_EIHW, y_E = data.x[client], data.y[client]
    optimiser = torch.optim.SGD(module.parameters(), SGD.rate(KEY.round), SGD.momentum)
    module.train()
    torch.manual_seed(KEY.of(client, "dropout").number())
    for batch in batches(len(y_E), KEY.of(client, "order").torch()):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x_EIHW[batch]), y_E[batch]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def batches(examples: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    for _ in range(SGD.epochs):
        yield from torch.split(torch.randperm(examples, generator=generator), SGD.batch)


def with_plain_loop(data: Block, workers: int, stack: ExitStack) -> Contestant:
    connections = [start(data, clients, stack) for clients in balanced([len(y) for y in data.y], workers)]

    def turn() -> float:
        started = time.perf_counter()
        for connection in connections:
            connection.send("go")
        for connection in connections:
            connection.recv()
        return time.perf_counter() - started

    return turn


def start(data: Block, clients: range, stack: ExitStack) -> Connection:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=work, args=(data, clients, there), daemon=True)
    process.start()
    there.close()
    stack.callback(process.join)
    stack.callback(process.terminate)
    return here


def work(data: Block, clients: range, connection: Connection) -> None:
    torch.set_num_threads(1)
    module = first_model()
    first = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    while connection.recv():
        for client in clients:
            module.load_state_dict(first)
            train_plainly(module, data, client)
        connection.send("done")


def first_model() -> nn.Module:
    """The one that every client of fedspd starts from."""
    learner, module = Learner(model, SGD), model()
    module.load_state_dict(learner.export(learner.draw(Key(KEY.seed).of("model", 0))))
    return module


# ---- the measurement


def difference(data: Block) -> float:
    """The largest difference between the parameters that both find for client 0: rounding, if they do the same work."""
    learner, module = Learner(model, SGD), first_model()
    drawn_1P = learner.draw(Key(KEY.seed).of("model", 0))[None]
    alone = Block([0], len(data), data.x[:1], data.y[:1], data.width)
    found = learner.export(learner.train(drawn_1P, alone, KEY)[0])
    train_plainly(module, data, 0)
    return max(float((found[name] - tensor).abs().max()) for name, tensor in module.state_dict().items())


def measure(workload: Workload, data: Block, workers: int) -> dict[str, Any]:
    """Turns of both, one after the other; the first of each is not counted."""
    with ExitStack() as stack:
        plain, fedspd = with_plain_loop(data, workers, stack), with_fedspd(data, workers, stack)
        turns = [(workload.trained / fedspd(), workload.trained / plain()) for _ in range(workload.repeats + 1)][1:]
    fedspd_speed, plain_speed = (median(speeds) for speeds in zip(*turns, strict=True))
    ratios = sorted(one / other for one, other in turns)
    return {
        "workers": workers,
        "fedspd": round(fedspd_speed, 1),
        "plain": round(plain_speed, 1),
        "ratio": round(fedspd_speed / plain_speed, 4),
        "lowest": round(ratios[0], 4),
        "highest": round(ratios[-1], 4),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="Local training, examples per second (medians)", title_justify="left")
    for column in ("processes", "fedspd", "plain torch loop", "ratio", "ratio of a pair of turns"):
        shown.add_column(column, justify="right")
    for row in rows:
        spread = f"{row['lowest']:.2f} to {row['highest']:.2f}"
        shown.add_row(str(row["workers"]), f"{row['fedspd']:,.0f}", f"{row['plain']:,.0f}", f"{row['ratio']:.2f}", spread)
    return shown


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a few seconds, whose numbers mean little")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON instead of the table")] = False,
) -> None:
    """Examples per second of fedspd's local training against a plain torch loop."""
    torch.set_num_threads(1)
    workload = QUICK if quick else FULL
    data = workload.block()
    apart = difference(data)
    rows = [measure(workload, data, workers) for workers in WORKERS]
    if as_json:
        about = {"torch": torch.__version__, "instructions": torch.backends.cpu.get_cpu_capability(), "machine": platform.machine()}
        print(json.dumps({"results": rows, "difference": apart, "target": TARGET, "turns": workload.repeats, **about}))
        return
    Console().print(table(rows))
    print(f"Target: a ratio of at least {TARGET}. Turns of each: {workload.repeats}. Parameters agree to {apart:.0e}.")


if __name__ == "__main__":
    typer.run(main)
