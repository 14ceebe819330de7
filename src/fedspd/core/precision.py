"""The precision of local training: float32, or bfloat16 by torch.autocast.

In bfloat16 a training step multiplies matrices and images in half the bytes. Weights, gradients,
momentum and means stay in float32, and so do losses and evaluations: they are those of the model
that is exported.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch

Precision = Literal["float32", "bf16"]
# The names under which Linux lists bfloat16 instructions: those of x86, and those of Arm.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
PROCESSOR_FILE = Path("/proc/cpuinfo")


def forward_precision(precision: Precision) -> AbstractContextManager[object]:
    """Return the context of a forward pass in training; its backward pass follows it."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def has_bfloat16() -> bool:
    """Return whether this processor is known to have bfloat16 instructions.

    Without them bfloat16 is emulated, and slower than float32.
    """
    try:
        words = PROCESSOR_FILE.read_text("utf-8").split()
    except OSError:  # not Linux: unknown
        return False
    return not BFLOAT16_FLAGS.isdisjoint(words)
