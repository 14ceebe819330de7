"""The two CNNs of the FedSPD paper (Lin et al., UAI 2025, appendix "Experiment details").

The output is [n, outputs].
"""

from torch import nn

from fedspd.models import shapes
from fedspd.models.dropout import Dropout


class PaperCNN(nn.Sequential):
    """The paper's CNN for MNIST and EMNIST."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        channels, height, width = shapes.image_shape(shape, "cnn", smallest=4)
        super().__init__(
            *(nn.Conv2d(channels, 10, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(10, 20, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Flatten(), Dropout(0.5)),
            *(nn.Linear(20 * (height // 4) * (width // 4), 50), nn.ReLU()),
            nn.Linear(50, outputs),
        )


class CifarCNN(nn.Sequential):
    """The paper's CNN for CIFAR; small: a quarter of the channels and of the dense widths."""

    def __init__(
        self, shape: tuple[int, ...], outputs: int, small: bool = False, norm: str = "batch"
    ) -> None:
        channels, height, width = shapes.image_shape(shape, "cifar-cnn", smallest=4)
        low, high, wide, narrow = (32, 64, 256, 128) if small else (128, 256, 1024, 512)
        super().__init__(
            *_stage(channels, low, 5, norm),
            *_stage(low, high, 3, norm),
            nn.Flatten(),
            *(*_dense(high * (height // 4) * (width // 4), wide, norm), Dropout(0.5)),
            *(*_dense(wide, narrow, norm), Dropout(0.5)),
            nn.Linear(narrow, outputs),
        )


GROUPS = 8  # of GroupNorm; every width is a multiple of it

# ReLU after pooling equals ReLU before pooling, bit for bit, on a quarter of the values.
# There is no bias before BatchNorm, which would subtract it: it would be sent but never learn.


def _stage(inputs: int, outputs: int, kernel: int, norm: str) -> tuple[nn.Module, ...]:
    first, second = _conv(inputs, outputs, kernel, norm), _conv(outputs, outputs, kernel, norm)
    return *first, nn.ReLU(), *second, nn.MaxPool2d(2), nn.ReLU(), Dropout(0.25)


def _conv(inputs: int, outputs: int, kernel: int, norm: str) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    if norm == "group":
        return convolution, nn.GroupNorm(GROUPS, outputs)
    return convolution, nn.BatchNorm2d(outputs)


def _dense(inputs: int, outputs: int, norm: str) -> tuple[nn.Module, ...]:
    scaled = nn.GroupNorm(GROUPS, outputs) if norm == "group" else nn.BatchNorm1d(outputs)
    return nn.Linear(inputs, outputs, bias=False), scaled, nn.ReLU()
