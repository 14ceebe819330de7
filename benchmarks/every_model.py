"""Every kind of model and every method over a plain torch loop: is anything slower than it?

    python benchmarks/every_model.py            models, then methods
    python benchmarks/every_model.py models     one of the two

Both sides train the same module on the same random examples in the same batches and take turns, in
processor seconds, one thread each. A method's row compares a complete round, with its exchange and
its losses, with as many steps of the plain loop. Ratios are medians of the turns; the lowest of a
single turn stands beside it.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedspd.algorithms import METHODS
from fedspd.bench import plain
from fedspd.bench.local_training import fedspd_task, plain_task
from fedspd.bench.results import TimedTask, time_in_turns
from fedspd.config import validate
from fedspd.core.block import Block
from fedspd.core.flat_module import Factory
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.engines.simulator import Simulator
from fedspd.experiment.build import build_experiment
from fedspd.models import MLP, CifarCNN, Embedding, Linear, MobileNetV2, PaperCNN
from fedspd.runtime.processes import keep_memory

TURNS = 5
CLASSES, WORDS, LENGTH = plain.CLASSES, 500, 16
IMAGE, SENSOR = (3, 32, 32), (6, 64)


class Recurrent(nn.Module):
    """An LSTM over time, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SENSOR[0], 32, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x.transpose(1, 2))[0][:, -1])
        return logits


class Attention(nn.Module):
    """Words, a layer of a transformer, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Embedding(WORDS, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.words(x)).mean(1))
        return logits


def normed(features: int) -> nn.Module:
    """Return a dense model with BatchNorm, whose clients train one after another."""
    norm = nn.BatchNorm1d(plain.HIDDEN)
    return nn.Sequential(
        nn.Linear(features, plain.HIDDEN), norm, nn.ReLU(), nn.Linear(plain.HIDDEN, CLASSES)
    )


def sensors() -> nn.Module:
    """Return convolutions over time."""
    first = nn.Conv1d(SENSOR[0], 16, 5, padding=2)
    second = nn.Conv1d(16, 32, 5, padding=2)
    pools = nn.MaxPool1d(2), nn.ReLU()
    dense = nn.Linear(32 * SENSOR[1] // 4, CLASSES)
    return nn.Sequential(first, *pools, second, *pools, nn.Flatten(), dense)


def words() -> nn.Module:
    """Return words and dense layers."""
    dense = nn.Linear(LENGTH * 16, plain.HIDDEN), nn.ReLU(), nn.Linear(plain.HIDDEN, CLASSES)
    return nn.Sequential(Embedding(WORDS, 16), nn.Flatten(), *dense)


class Case(NamedTuple):
    """A model, the shape of its examples, and how many of them each of its clients has."""

    what: str
    factory: Factory
    shape: tuple[int, ...]
    examples: int
    batch: int
    clients: int = 1


def case(what: str, model: Callable[..., nn.Module], shape: tuple[int, ...], *sizes: int) -> Case:
    """Return the case of a model of fedspd."""
    return Case(what, partial(model, shape, CLASSES), shape, *sizes)


CASES = (
    case("linear, 64 features", Linear, (64,), 72, 10),
    case("linear, 64 features", Linear, (64,), 72, 10, 20),
    case("linear, 784 features", Linear, (784,), 300, 50, 20),
    case("MLP 64-64-10", MLP, (64,), 72, 10),
    case("MLP 64-64-10", MLP, (64,), 72, 10, 20),
    case("MLP 64-64-10", MLP, (64,), 72, 1, 20),
    case("MLP 784-64-10", MLP, (784,), 300, 50, 20),
    case("MLP 784-256-10, above 100,000 parameters", partial(MLP, hidden=256), (784,), 300, 50, 4),
    Case("MLP with BatchNorm", partial(normed, 64), (64,), 72, 10, 20),
    Case("words and dense layers", words, (LENGTH,), 72, 10, 20),
    Case("words and attention", Attention, (LENGTH,), 72, 10, 4),
    Case("convolutions over time", sensors, SENSOR, 72, 10, 4),
    Case("LSTM", Recurrent, SENSOR, 72, 10, 4),
    case("MNIST CNN", PaperCNN, plain.SHAPE, 300, 50),
    case("MNIST CNN", PaperCNN, plain.SHAPE, 72, 10),
    case("MNIST CNN", PaperCNN, plain.SHAPE, 30, 1),
    case("CIFAR CNN, small", partial(CifarCNN, small=True), IMAGE, 100, 50),
    case(
        "CIFAR CNN, small, GroupNorm", partial(CifarCNN, small=True, norm="group"), IMAGE, 100, 50
    ),
    case("CIFAR CNN", CifarCNN, IMAGE, 50, 50),
    case("MobileNet-v2", MobileNetV2, IMAGE, 50, 50),
)


def time_model(case: Case) -> list[float]:
    """Return the ratio of every turn: fedspd's speed over that of a plain loop."""
    training = training_of(case.batch)
    data = make_block(case)
    tasks = (
        fedspd_task(Learner(case.factory, training), data),
        plain_task(case.factory, data, training),
    )
    return [loop / own for own, loop in time_in_turns(tasks, TURNS)]


def training_of(batch: int) -> TrainingOptions:
    """Return the training of both sides."""
    return TrainingOptions(
        lr=plain.LR, momentum=plain.MOMENTUM, batch=batch, epochs=2, first_round_factor=1
    )


def make_block(case: Case) -> Block:
    """Return clients with random examples; those of words are numbers of words."""
    generator = torch.Generator().manual_seed(0)
    size = case.clients, case.examples
    x = torch.rand(*size, *case.shape, generator=generator)
    if case.shape == (LENGTH,):
        x = (x * WORDS).floor()
    y = torch.randint(CLASSES, size, generator=generator)
    return Block(range(case.clients), case.clients, [*x], [*y], case.examples)


# ---- methods

NETWORKS = {  # by name of the model: what it trains
    "mlp": Case("MLP 64-64-10", plain.build_mlp, (64,), 72, 10, 20),
    "cnn": Case("MNIST CNN", plain.PlainCNN, plain.SHAPE, 200, 20, 6),
}


def time_method(method: str, model: str) -> list[float]:
    """Return the ratio of every turn: as many steps of a plain loop over a round."""
    network = NETWORKS[model]
    steps: list[int] = []
    loop = plain_task(network.factory, make_block(network), training_of(network.batch))
    looped = 2 * network.clients * -(-network.examples // network.batch)  # steps of two epochs
    turns = time_in_turns([rounds_of(method, model, steps), loop], TURNS)
    return [
        seconds * taken / looped / own
        for (own, seconds), taken in zip(turns, steps[-TURNS:], strict=True)
    ]


def rounds_of(method: str, model: str, steps: list[int]) -> TimedTask:
    """Return a task that runs the next round, and adds its gradient steps to the list."""
    network = NETWORKS[model]
    pool = make_block(network._replace(clients=1, examples=2 * network.clients * network.examples))
    config = {
        "method": method,
        "clients": network.clients,
        "clusters": 2,
        "rounds": 100,
        "data": {"examples": network.examples, "test_examples": 1, "mixture": "iid"},
        "topology": {"degree": network.clients - 2},
        "model": {"name": model},
        "training": {"batch": network.batch, "first_round_factor": 1},
    }
    if method == "fedspd-split":
        config["fedspd-split"] = {"warmup": 1}
    x, y = pool.x[0], pool.y[0]
    experiment = build_experiment(
        validate(config), (x, y, x[: network.clients], y[: network.clients])
    )
    engine, numbers = Simulator(experiment.plan), count(1)
    engine.begin()

    def run_round() -> float:
        t, started = next(numbers), time.process_time()
        report = engine.round(t, experiment.topology.at(t))
        steps.append(report.steps)
        return time.process_time() - started

    for _ in range(3):  # FedSPD-Split has split by then
        run_round()
    return run_round


def main() -> None:
    """Print one row for every model, and one for every method."""
    keep_memory()
    if "methods" not in sys.argv[1:]:
        for each in CASES:
            size = f"{each.clients} x {each.examples} | {each.batch}"
            print(f"| {each.what} | {size} | {ratios(time_model(each))} |", flush=True)
    if "models" not in sys.argv[1:]:
        for method in METHODS:
            cells = [ratios(time_method(method, model)) for model in NETWORKS]
            print(f"| {method} | {' | '.join(cells)} |", flush=True)


def ratios(turns: list[float]) -> str:
    """Return the cells of a row."""
    return f"{median(turns):.2f} | {min(turns):.2f}"


if __name__ == "__main__":
    main()
