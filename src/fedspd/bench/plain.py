"""The yardstick: the paper's MNIST CNN, a small MLP, and a training loop in plain torch.

Only torch is imported, so that other packages can train the same models in their environments.

Shapes: E examples of a client, I channels, H height, W width, F features.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

SHAPE, CLASSES = (1, 28, 28), 10
LR, MOMENTUM, BATCH, EPOCHS = 0.05, 0.5, 50, 5
FEATURES, HIDDEN, FEW_EXAMPLES, SMALL_BATCH = 64, 64, 72, 10  # as the digits of scikit-learn


class PlainCNN(nn.Module):
    """The paper's CNN for MNIST."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 10, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(10, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Dropout(dropout), nn.Linear(980, 50), nn.ReLU(), nn.Linear(50, CLASSES)
        )

    def forward(self, x_EIHW: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x_EIHW))
        return logits


def build_mlp() -> nn.Module:
    """Return the small model."""
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def pixels(clients: int, examples: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return random pixels and labels in MNIST's shape for every client.

    The time of a training step does not depend on the picture.
    """
    generator = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(clients):
        x_EIHW = torch.rand(examples, *SHAPE, generator=generator) * 2 - 1
        data.append((x_EIHW, torch.randint(CLASSES, (examples,), generator=generator)))
    return data


def features(clients: int, examples: int = FEW_EXAMPLES) -> list[tuple[Tensor, Tensor]]:
    """Return random features and labels of the small model for every client."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for _ in range(clients):
        x_EF = torch.rand(examples, FEATURES, generator=generator)
        data.append((x_EF, torch.randint(CLASSES, (examples,), generator=generator)))
    return data


def train(
    module: nn.Module,
    x_E: Tensor,
    y_E: Tensor,
    generator: torch.Generator,
    batch_size: int = BATCH,
    epochs: int = EPOCHS,
) -> None:
    """Train the module by SGD."""
    optimiser = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
    module.train()
    for batch in batches(len(y_E), generator, batch_size, epochs):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(module(x_E[batch]), y_E[batch])
        torch.autograd.backward(loss)
        optimiser.step()


def batches(
    examples: int, generator: torch.Generator, batch_size: int = BATCH, epochs: int = EPOCHS
) -> Iterator[Tensor]:
    """Yield the indices of every batch of every epoch."""
    for _ in range(epochs):
        yield from torch.split(torch.randperm(examples, generator=generator), batch_size)
