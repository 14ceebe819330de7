"""Where bfloat16 gains: processor time of a training step of the MNIST CNN, layer by layer.

    python benchmarks/precision_by_layer.py

Trains the first 1, 2, ... layers in float32 and in bfloat16, in turns, and prints what each layer
adds to the forward and backward pass, in microseconds: the shortest of 25 turns, one thread.
"""

import time
from collections.abc import Callable

import torch
from torch import nn

from fedspd.bench import plain
from fedspd.core.learner import Learner, one_thread
from fedspd.core.precision import forward_precision
from fedspd.models import PaperCNN
from fedspd.runtime.processes import keep_memory

TURNS, STEPS = 25, 10


def main() -> None:
    """Print one row for every layer."""
    keep_memory()
    learners = [
        Learner(lambda: PaperCNN(plain.SHAPE, plain.CLASSES), precision=precision)
        for precision in ("float32", "bf16")
    ]
    x = torch.randn(plain.BATCH, *plain.SHAPE).contiguous(memory_format=torch.channels_last)
    layers = len(list(learners[0].module))
    tasks = [step(learner, n, x) for n in range(1, layers + 1) for learner in learners]
    with one_thread():
        shortest = measure(tasks)
    before = (0.0, 0.0)
    for n, layer in enumerate(learners[0].module):
        full, short = shortest[2 * n : 2 * n + 2]
        print(f"| {type(layer).__name__} | {full - before[0]:.0f} | {short - before[1]:.0f} |")
        before = full, short
    print(f"| all | {before[0]:.0f} | {before[1]:.0f} |")


def step(learner: Learner, count: int, x: torch.Tensor) -> Callable[[], None]:
    """Return a pass through the first layers, and back."""
    learner.module.train()
    layers = nn.Sequential(*list(learner.module)[:count])

    def run() -> None:
        learner.gradient.zero_()
        with forward_precision(learner.precision):
            output = layers(x)
        output.backward(torch.ones_like(output))

    return run


def measure(tasks: list[Callable[[], None]]) -> list[float]:
    """Return the shortest time of each task, in microseconds."""
    seconds: list[list[float]] = [[] for _ in tasks]
    for _ in range(TURNS):
        for own, task in zip(seconds, tasks, strict=True):
            start = time.process_time()
            for _ in range(STEPS):
                task()
            own.append((time.process_time() - start) / STEPS)
    return [1e6 * min(own) for own in seconds]


if __name__ == "__main__":
    main()
