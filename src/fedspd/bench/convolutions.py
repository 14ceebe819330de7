"""Benchmarks of larger convolutional models: local training over a plain torch loop.

Both train the same module on the same random pixels with the same batches, in one process with one
thread, with an allocator that keeps freed memory. Processor seconds count. A target is the gain by
channels-last memory in a plain step, as once measured; the numbers of a row have that of this
machine.
"""

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from fedspd.bench import plain
from fedspd.bench.bfloat16 import CIFAR_SHAPE, TRAINING, make_block
from fedspd.bench.local_training import fedspd_task, plain_task
from fedspd.bench.results import BenchmarkResult, BenchmarkSize, time_in_turns
from fedspd.core.flat_module import Factory
from fedspd.core.learner import Learner
from fedspd.models import CifarCNN, MobileNetV2
from fedspd.runtime.processes import keep_memory


class Case(NamedTuple):
    """A model, the most examples that it trains on, and its target."""

    what: str
    factory: Factory
    examples: int
    target: float


CASES = {
    "cifar_small": Case(
        "the small CIFAR CNN",
        partial(CifarCNN, CIFAR_SHAPE, plain.CLASSES, small=True),
        300,
        1.09,
    ),
    "mobilenet": Case(
        "MobileNet-v2",
        partial(MobileNetV2, CIFAR_SHAPE, plain.CLASSES),
        100,
        1.66,
    ),
}


def measure_convolutions(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare the speed of local training of larger models."""
    keep_memory()
    for name, case in CASES.items():
        data = make_block(CIFAR_SHAPE, min(size.examples, case.examples), clients=1)
        own_task = fedspd_task(Learner(case.factory, TRAINING), data)
        formats = torch.contiguous_format, torch.channels_last
        loops = [plain_task(case.factory, data, TRAINING, layout) for layout in formats]
        tasks = [own_task, *loops]
        turns = time_in_turns(tasks, size.turns)
        examples = data.width * TRAINING.epochs
        own, loop, ordered = (examples / median(seconds) for seconds in zip(*turns, strict=True))
        yield BenchmarkResult.from_turns(
            name,
            f"{case.what}: examples per processor second of local training over those of a plain "
            "torch loop",
            [p / f for f, p, _ in turns],
            case.target,
            at_least=True,
            fedspd=own,
            plain=loop,
            channels_last=ordered,
        )
