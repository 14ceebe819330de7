"""The two CNNs of the FedSPD paper (Lin et al., UAI 2025, appendix "Experiment details"). Output: [n, outputs]."""

from torch import nn

from fedspd.models import shapes
from fedspd.models.dropout import Dropout


class PaperCNN(nn.Sequential):
    """For MNIST and EMNIST."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        channels, height, width = shapes.image(shape, "cnn", smallest=4)
        super().__init__(
            *(nn.Conv2d(channels, 10, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(10, 20, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Flatten(), Dropout(0.5)),
            *(nn.Linear(20 * (height // 4) * (width // 4), 50), nn.ReLU()),
            nn.Linear(50, outputs),
        )


class CifarCNN(nn.Sequential):
    """For CIFAR; small: a quarter of the channels and of the dense widths."""

    def __init__(self, shape: tuple[int, ...], outputs: int, small: bool = False) -> None:
        channels, height, width = shapes.image(shape, "cifar-cnn", smallest=4)
        low, high, wide, narrow = (32, 64, 256, 128) if small else (128, 256, 1024, 512)
        super().__init__(
            *(
                *_conv(channels, low, 5),
                nn.ReLU(),
                *_conv(low, low, 5),
                nn.MaxPool2d(2),
                nn.ReLU(),
                Dropout(0.25),
            ),
            *(
                *_conv(low, high, 3),
                nn.ReLU(),
                *_conv(high, high, 3),
                nn.MaxPool2d(2),
                nn.ReLU(),
                Dropout(0.25),
            ),
            nn.Flatten(),
            *(*_dense(high * (height // 4) * (width // 4), wide), Dropout(0.5)),
            *(*_dense(wide, narrow), Dropout(0.5)),
            nn.Linear(narrow, outputs),
        )


# ReLU after pooling is ReLU before pooling, to the bit, on a quarter of the numbers.
# No bias before BatchNorm: it would be subtracted again, so it would be sent but never learn.


def _conv(inputs: int, outputs: int, kernel: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(
        outputs
    )


def _dense(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()
