"""Models for examples of any shape, which they read as one row of numbers. Output: [n, outputs]."""

from torch import nn

from fedspd.models import shapes


class Linear(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(shapes.features(shape, "linear"), outputs))


class MLP(nn.Sequential):
    """One hidden layer."""

    def __init__(self, shape: tuple[int, ...], outputs: int, hidden: int = 64) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(shapes.features(shape, "mlp"), hidden),
            nn.ReLU(),
            nn.Linear(hidden, outputs),
        )
