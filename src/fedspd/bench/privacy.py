"""Benchmark of private training: a step of DP-SGD over a plain one, for the paper's CNN.

Processor seconds count. Both take batches of one size.
"""

import time
from collections.abc import Iterator
from functools import partial
from statistics import median

from fedspd.bench import plain
from fedspd.bench.results import BenchmarkResult, BenchmarkSize, TimedTask, time_in_turns
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.core.mechanism import Mechanism
from fedspd.models import PaperCNN
from fedspd.privacy.mechanisms import DPSGD

SHAPE, CLASSES, BATCH = (1, 28, 28), 10, 50
EPOCHS = 10  # of one timed task; each is one batch


def measure_privacy(size: BenchmarkSize) -> Iterator[BenchmarkResult]:
    """Compare a private step with a plain one."""
    x, y = plain.pixels(1, BATCH)[0]
    data = Block([0], 1, [x], [y], BATCH)
    mechanism = DPSGD.of(noise=1.0, clip=1.0, rate=1.0, epochs=1)
    turns = time_in_turns([steps_of(own, data) for own in (mechanism, None)], size.turns)
    private, free = (median(seconds) / EPOCHS for seconds in zip(*turns, strict=True))
    yield BenchmarkResult.from_turns(
        "private",
        "DP-SGD with the paper's CNN: processor seconds of a step over those of a plain one",
        [p / f for p, f in turns],
        3.0,
        at_least=False,
        private=private,
        plain=free,
    )


def steps_of(mechanism: Mechanism | None, data: Block) -> TimedTask:
    """Return a task that takes EPOCHS steps on all examples."""
    training = TrainingOptions(batch=BATCH)
    learner = Learner(partial(PaperCNN, SHAPE, CLASSES), training, mechanism=mechanism)
    model_CP = learner.draw(Key(0))[None]

    def take_steps() -> float:
        started = time.process_time()
        learner.train(model_CP, data, Key(0, 1), rates=[0.01] * EPOCHS)
        return time.process_time() - started

    take_steps()
    return take_steps
