"""The precision of local training: float32, or bfloat16 by torch.autocast.

In bfloat16 a training step multiplies matrices and images in half the bytes. Weights, gradients,
momentum and means stay in float32, and so do losses and evaluations: they are those of the model
that is exported.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

Precision = Literal["float32", "bf16"]
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
# The names under which Linux lists bfloat16 instructions: those of x86, and those of Arm.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
PROCESSOR_FILE = Path("/proc/cpuinfo")


def forward_precision(precision: Precision) -> AbstractContextManager[object]:
    """Return the context of a forward pass in training; its backward pass follows it."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def keep_slow_layers(module: nn.Module) -> None:
    """Let layers that are slower in bfloat16 train in float32.

    oneDNN has no fast gradient of the input of strided convolutions in groups of few channels in
    bfloat16: in MobileNet-v2 it took 30 to 300 times as long as in float32.
    """
    for layer in module.modules():
        if isinstance(layer, Convolution) and _is_slow(layer):
            layer.forward = partial(_in_float32, layer.forward)  # type: ignore[method-assign]


def _is_slow(layer: Convolution) -> bool:
    is_strided, is_thin = max(layer.stride) > 1, layer.in_channels < 4 * layer.groups
    return layer.groups > 1 and is_strided and is_thin


def _in_float32(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return forward(x.float())


def has_bfloat16() -> bool:
    """Return whether this processor is known to have bfloat16 instructions.

    Without them bfloat16 is emulated, and slower than float32.
    """
    try:
        words = PROCESSOR_FILE.read_text("utf-8").split()
    except OSError:  # not Linux: unknown
        return False
    return not BFLOAT16_FLAGS.isdisjoint(words)
