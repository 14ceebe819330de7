"""Benchmarks of convolutional models, in float32 and in bfloat16: local training over a plain loop.

Both train on the same random pixels with the same batches, each in one process with one thread. The
plain loop has float32 and torch's usual allocator, as in the benchmark of local training. Processor
seconds count. A target is a gain that was once measured in a plain step: by channels-last memory,
or by bfloat16 with it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple

import torch

from fedspd.bench import plain
from fedspd.bench.local_training import fedspd_task, plain_task
from fedspd.bench.results import BenchmarkResult, BenchmarkSize, TimedTask, time_in_turns
from fedspd.core.block import Block
from fedspd.core.flat_module import Factory
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.core.precision import Precision, has_bfloat16
from fedspd.models import CifarCNN, MobileNetV2, PaperCNN
from fedspd.runtime.processes import Child, keep_memory

TRAINING = TrainingOptions(
    lr=plain.LR, momentum=plain.MOMENTUM, batch=plain.BATCH, epochs=1, first_round_factor=1
)
CIFAR_SHAPE = (3, 32, 32)
FORMATS = torch.contiguous_format, torch.channels_last  # of the plain loops


class Case(NamedTuple):
    """A model, of fedspd and of the plain loop, its data and its rows with their targets."""

    what: str
    own: Factory
    plain: Factory
    shape: tuple[int, ...]
    clients: int
    examples: int  # of a client, at most
    rows: Mapping[Precision, tuple[str, float]]


SMALL = partial(CifarCNN, CIFAR_SHAPE, plain.CLASSES, small=True)
MOBILE = partial(MobileNetV2, CIFAR_SHAPE, plain.CLASSES)
CASES = (
    Case(
        "the MNIST CNN",
        partial(PaperCNN, plain.SHAPE, plain.CLASSES),
        plain.PlainCNN,
        *(plain.SHAPE, 4, 300),
        {"bf16": ("bf16_mnist", 1.98)},  # in float32: the row training_1
    ),
    Case(
        "the small CIFAR CNN",
        *(SMALL, SMALL, CIFAR_SHAPE, 1, 300),
        {"float32": ("cifar_small", 1.09), "bf16": ("bf16_cifar", 1.96)},
    ),
    Case(
        "MobileNet-v2",
        *(MOBILE, MOBILE, CIFAR_SHAPE, 1, 100),
        {"float32": ("mobilenet", 1.66), "bf16": ("bf16_mobilenet", 1.62)},
    ),
)


def measure_convolutions(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare the speed of local training, in bfloat16 where the processor has it."""
    with ExitStack() as stack:
        # The plain loops start first: a fork inherits how its parent keeps freed memory.
        prepared = [(case, *_prepare(case, size, stack)) for case in CASES]
        keep_memory()
        for case, data, loops in prepared:
            yield from _compare(case, data, loops, size)


def make_block(shape: tuple[int, ...], examples: int, clients: int) -> Block:
    """Return all clients with random pixels."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.rand(examples, *shape, generator=generator) * 2 - 1 for _ in range(clients)]
    y = [torch.randint(plain.CLASSES, (examples,), generator=generator) for _ in range(clients)]
    return Block(range(clients), clients, x, y, examples)


def _prepare(case: Case, size: BenchmarkSize, stack: ExitStack) -> tuple[Block, list[TimedTask]]:
    data = make_block(case.shape, min(size.examples, case.examples), case.clients)
    builds = [partial(plain_task, case.plain, data, TRAINING, layout) for layout in FORMATS]
    return data, [_in_child(build, stack) for build in builds]


def _in_child(build: Callable[[], TimedTask], stack: ExitStack) -> TimedTask:
    """Return a task that a fork builds and works on."""

    def serve(connection: Connection) -> None:
        task = build()
        while connection.recv():
            connection.send(task())

    child = stack.enter_context(closing(Child("A plain loop", serve)))

    def run() -> float:
        child.send("go")
        return float(child.receive())

    return run


def _compare(
    case: Case, data: Block, loops: list[TimedTask], size: BenchmarkSize
) -> Iterator[BenchmarkResult]:
    precisions: list[Precision] = ["float32", "bf16"] if has_bfloat16() else ["float32"]
    own = [fedspd_task(Learner(case.own, TRAINING, precision=p), data) for p in precisions]
    turns = time_in_turns([*own, *loops], size.turns)
    names = [*precisions, "plain", "channels_last"]
    examples = sum(len(y) for y in data.y) * TRAINING.epochs
    speeds = {
        name: examples / median(seconds)
        for name, seconds in zip(names, zip(*turns, strict=True), strict=True)
    }
    for number, precision in enumerate(precisions):
        if precision not in case.rows:
            continue
        name, target = case.rows[precision]
        yield BenchmarkResult.from_turns(
            name,
            f"{case.what} in {precision}: examples per processor second of local training over "
            "those of a plain torch loop in float32",
            [turn[-2] / turn[number] for turn in turns],
            target,
            at_least=True,
            **speeds,
        )
