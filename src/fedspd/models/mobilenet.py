"""MobileNetV2 (Sandler et al., CVPR 2018, arXiv 1801.04381) for 32 x 32 images.

The output is [n, outputs]. Shapes: N examples, C channels, H height, W width.
"""

from typing import NamedTuple

from torch import Tensor, nn

from fedspd.models import shapes

STEM_CHANNELS, LAST_CHANNELS = 32, 1280


class Stage(NamedTuple):
    """A row of the paper's Table 2, by its symbols."""

    t: int  # expansion factor
    c: int  # output channels
    n: int  # blocks
    s: int  # stride of the first block


# As usual for 32 x 32 images, the stem and the stage of 24 channels have stride 1; for 224 x 224
# images the paper has stride 2.
STAGES = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 1),
    Stage(6, 32, 3, 2),
    Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2),
    Stage(6, 320, 1, 1),
)


class MobileNetV2(nn.Sequential):
    """MobileNetV2 with strides for small images."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        channels, _, _ = shapes.image_shape(shape, "mobilenet-v2", smallest=8)
        super().__init__(
            *_conv(channels, STEM_CHANNELS, 3),
            *_blocks(),
            *_conv(STAGES[-1].c, LAST_CHANNELS, 1),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(LAST_CHANNELS, outputs),
        )


class InvertedResidual(nn.Module):
    """A block that expands, filters each channel and projects without a non-linearity.

    It adds its input if the shapes agree.
    """

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = inputs * expansion
        expand = _conv(inputs, inner, 1) if expansion > 1 else ()
        project = nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.body = nn.Sequential(*expand, *_conv(inner, inner, 3, stride, groups=inner), *project)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y_NCHW: Tensor = self.body(x_NCHW)
        return x_NCHW + y_NCHW if self.is_residual else y_NCHW


def _blocks() -> list[InvertedResidual]:
    blocks, inputs = [], STEM_CHANNELS
    for t, c, n, s in STAGES:
        for i in range(n):
            blocks.append(InvertedResidual(inputs, c, t, s if i == 0 else 1))
            inputs = c
    return blocks


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(
        inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False
    )
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU6()
