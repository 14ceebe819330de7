"""Benchmarks of `precision = "bf16"`: local training of convolutional models over that in float32.

Both train the same clients on the same random pixels, in one process with one thread. Processor
seconds count.
"""

from collections.abc import Iterator
from functools import partial
from statistics import median

import torch

from fedspd.bench import plain
from fedspd.bench.local_training import fedspd_task
from fedspd.bench.results import BenchmarkResult, BenchmarkSize, time_in_turns
from fedspd.core.block import Block
from fedspd.core.flat_module import Factory
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.core.precision import Precision, has_bfloat16
from fedspd.models import CifarCNN, PaperCNN

CLIENTS = 2
PRECISIONS: tuple[Precision, ...] = ("bf16", "float32")
TRAINING = TrainingOptions(
    lr=plain.LR, momentum=plain.MOMENTUM, batch=plain.BATCH, epochs=1, first_round_factor=1
)
CIFAR_SHAPE = (3, 32, 32)
# By name: the model, the shape of its images and the target.
MODELS: dict[str, tuple[str, Factory, tuple[int, ...], float]] = {
    "bf16_mnist": (
        "the MNIST CNN",
        partial(PaperCNN, plain.SHAPE, plain.CLASSES),
        plain.SHAPE,
        1.29,
    ),
    "bf16_cifar": (
        "the small CIFAR CNN",
        partial(CifarCNN, CIFAR_SHAPE, plain.CLASSES, small=True),
        CIFAR_SHAPE,
        1.8,
    ),
}


def measure_bfloat16(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare the speed of local training in both precisions, where the processor has both."""
    for name, (what, factory, shape, target) in MODELS.items() if has_bfloat16() else ():
        data = make_block(shape, size.examples)
        learners = [Learner(factory, TRAINING, precision=p) for p in PRECISIONS]
        tasks = [fedspd_task(learner, data) for learner in learners]
        turns = time_in_turns(tasks, size.turns)
        examples = CLIENTS * size.examples * TRAINING.epochs
        short, full = (examples / median(seconds) for seconds in zip(*turns, strict=True))
        yield BenchmarkResult.from_turns(
            name,
            f"{what} with precision = bf16: examples per processor second of local training over "
            "those with float32",
            [f / s for s, f in turns],
            target,
            at_least=True,
            bf16=short,
            float32=full,
        )


def make_block(shape: tuple[int, ...], examples: int, clients: int = CLIENTS) -> Block:
    """Return all clients with random pixels."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.rand(examples, *shape, generator=generator) * 2 - 1 for _ in range(clients)]
    y = [torch.randint(plain.CLASSES, (examples,), generator=generator) for _ in range(clients)]
    return Block(range(clients), clients, x, y, examples)
