"""Timed tasks of local training in processor seconds: fedspd's learner, and a plain torch loop."""

import time

import torch

from fedspd.bench import plain
from fedspd.bench.results import TimedTask
from fedspd.core.block import Block
from fedspd.core.flat_module import Factory
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions, one_thread

KEY = Key(0, round=1)


def fedspd_task(learner: Learner, data: Block) -> TimedTask:
    """Return a task that trains all clients with fedspd."""
    model_CP = learner.draw(KEY.of("model")).repeat(len(data), 1)

    def train() -> float:
        started = time.process_time()
        learner.train(model_CP, data, KEY)
        return time.process_time() - started

    return train


def plain_task(
    factory: Factory,
    data: Block,
    training: TrainingOptions,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> TimedTask:
    """Return a task that trains all clients with a plain loop."""
    module = factory()
    module.to(memory_format=memory_format)  # type: ignore[call-overload]
    first = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def train() -> float:
        started = time.process_time()
        with one_thread():
            for client, x_E, y_E in zip(data.clients, data.x, data.y, strict=True):
                module.load_state_dict(first)
                order = KEY.of(client, "order").torch()
                images = x_E.contiguous(memory_format=memory_format) if x_E.ndim == 4 else x_E
                plain.train(module, images, y_E, order, training.batch, training.epochs)
        return time.process_time() - started

    return train
