"""Models for examples of any shape, which they flatten. The output is [n, outputs]."""

from torch import nn

from fedspd.models import shapes


class Linear(nn.Sequential):
    """One dense layer."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(shapes.feature_count(shape, "linear"), outputs))


class MLP(nn.Sequential):
    """A multilayer perceptron with one hidden layer."""

    def __init__(self, shape: tuple[int, ...], outputs: int, hidden: int = 64) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(shapes.feature_count(shape, "mlp"), hidden),
            nn.ReLU(),
            nn.Linear(hidden, outputs),
        )
