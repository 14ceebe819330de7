"""Benchmarks of small models: many clients that train an MLP on few features.

fedspd and a plain torch loop train on the same random examples with the same first model, batches
and optimiser, in one process with one thread. Processor seconds count.

Shapes: E examples of a client, F features.
"""

import time
from collections.abc import Iterator
from statistics import median

from fedspd.bench import plain
from fedspd.bench.results import BenchmarkResult, BenchmarkSize, TimedTask, time_in_turns
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions, one_thread

TRAINING = TrainingOptions(
    lr=plain.LR,
    momentum=plain.MOMENTUM,
    batch=plain.SMALL_BATCH,
    epochs=2,
    first_round_factor=1,
)
TARGETS = {20: 3.0, 200: 8.0}  # by number of clients
KEY = Key(0, round=1)


def measure_small_models(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare the speed of local training of a small model."""
    for clients, target in TARGETS.items():
        data = make_block(clients)
        turns = time_in_turns([fedspd_training(data), plain_training(data)], size.turns)
        examples = clients * data.width * TRAINING.epochs
        own, loop = (examples / median(seconds) for seconds in zip(*turns, strict=True))
        yield BenchmarkResult.from_turns(
            f"small_{clients}",
            f"an MLP of {plain.FEATURES} features, {clients} clients: examples per processor "
            "second of local training over those of a plain torch loop",
            [p / f for f, p in turns],
            target,
            at_least=True,
            fedspd=own,
            plain=loop,
        )


def make_block(clients: int) -> Block:
    """Return all clients with random examples."""
    x_EF, y_E = zip(*plain.features(clients), strict=True)
    return Block(range(clients), clients, x_EF, y_E, plain.FEW_EXAMPLES)


def fedspd_training(data: Block) -> TimedTask:
    """Return a task that trains all clients with fedspd."""
    learner = Learner(plain.build_mlp, TRAINING)
    model_CP = learner.draw(KEY.of("model")).repeat(len(data), 1)

    def train() -> float:
        started = time.process_time()
        learner.train(model_CP, data, KEY)
        return time.process_time() - started

    return train


def plain_training(data: Block) -> TimedTask:
    """Return a task that trains all clients with a plain loop."""
    module = plain.build_mlp()
    first = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def train() -> float:
        started = time.process_time()
        with one_thread():
            for client, x_E, y_E in zip(data.clients, data.x, data.y, strict=True):
                module.load_state_dict(first)
                order = KEY.of(client, "order").torch()
                plain.train(module, x_E, y_E, order, TRAINING.batch, TRAINING.epochs)
        return time.process_time() - started

    return train
