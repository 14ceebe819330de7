"""Benchmarks of small models: many clients that train an MLP on few features.

fedspd and a plain torch loop train on the same random examples with the same first model, batches
and optimiser, in one process with one thread. Processor seconds count.

Shapes: E examples of a client, F features.
"""

from collections.abc import Iterator
from statistics import median

from fedspd.bench import plain
from fedspd.bench.local_training import fedspd_task, plain_task
from fedspd.bench.results import BenchmarkResult, BenchmarkSize, time_in_turns
from fedspd.core.block import Block
from fedspd.core.learner import Learner, TrainingOptions

TRAINING = TrainingOptions(
    lr=plain.LR,
    momentum=plain.MOMENTUM,
    batch=plain.SMALL_BATCH,
    epochs=2,
    first_round_factor=1,
)
TARGETS = {20: 3.0, 200: 8.0}  # by number of clients


def measure_small_models(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare the speed of local training of a small model."""
    for clients, target in TARGETS.items():
        data = make_block(clients, min(size.examples, plain.FEW_EXAMPLES))
        own_task = fedspd_task(Learner(plain.build_mlp, TRAINING), data)
        turns = time_in_turns([own_task, plain_task(plain.build_mlp, data, TRAINING)], size.turns)
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


def make_block(clients: int, examples: int) -> Block:
    """Return all clients with so many random examples each."""
    x_EF, y_E = zip(*plain.features(clients, examples), strict=True)
    return Block(range(clients), clients, x_EF, y_E, examples)
