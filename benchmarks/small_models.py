"""Local training of small models: clients together, over the loop that takes one after another.

Prints the rows of the table in docs/performance.md. The two take turns, in processor seconds.

Shapes: C clients, E examples, P parameters of a model.
"""

import time
from functools import partial

import torch
from torch import Tensor

from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions
from fedspd.models import MLP

KEY = Key(0, round=2)
TURNS = 4
CASES = (  # features, clients, examples of each, batch, local epochs
    (64, 1, 72, 10, 5),
    (64, 20, 72, 10, 5),
    (64, 20, 72, 50, 5),
    (64, 200, 72, 10, 5),
    (64, 200, 72, 50, 5),
    (784, 1, 300, 50, 5),
    (784, 20, 300, 50, 5),
    *((features, clients, 50, 50, 1) for features in (64, 784) for clients in (1, 20)),
)


def main() -> None:
    """Print one row for every case."""
    for case in CASES:
        features, clients, examples, batch, epochs = case
        steps = epochs * -(-examples // batch)
        cells = [f"{features}", f"{clients}", f"{batch}", f"{steps}"]
        for only in (False, True):
            loop, together = measure(*case, only)
            cells += [f"{loop:.0f}", f"{together:.0f}", f"{together / loop:.1f}"]
        print("|", " | ".join(cells), "|")


def measure(
    features: int, clients: int, examples: int, batch: int, epochs: int, only: bool
) -> tuple[float, ...]:
    """Return thousands of examples per second of the loop, and of clients together."""
    training = TrainingOptions(batch=batch, epochs=epochs)
    learner = Learner(partial(MLP, (features,), 10), training)
    generator = KEY.of("data").torch()
    x = [torch.rand(examples, features, generator=generator) for _ in range(clients)]
    y = [torch.randint(10, (examples,), generator=generator) for _ in range(clients)]
    data = Block(range(clients), clients, x, y, examples)
    model_CP = learner.draw(KEY).repeat(clients, 1)
    share_C1 = torch.rand(clients, 1, generator=generator)
    only_CE = torch.rand(clients, examples, generator=generator) < share_C1 if only else None
    count = training.epochs * int(clients * examples if only_CE is None else only_CE.sum())
    trainer, seconds = learner.stacked_trainer, ([], [])
    for _ in range(TURNS * (1 if epochs > 1 else 10)):  # a single step is short
        for own, learner.stacked_trainer in zip(seconds, (None, trainer), strict=True):
            own.append(timed(learner, model_CP, data, only_CE))
    return tuple(count / min(own) / 1000 for own in seconds)


def timed(learner: Learner, model_CP: Tensor, data: Block, only_CE: Tensor | None) -> float:
    """Return the processor seconds of a local update of all clients."""
    start = time.process_time()
    learner.train(model_CP, data, KEY, only_CE=only_CE)
    return time.process_time() - start


if __name__ == "__main__":
    main()
