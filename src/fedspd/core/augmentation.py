"""Random changes of training images, as tensors, from a key.

Shapes: N examples, C channels, H height, W width.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedspd.core.keys import Key

Augmentation = Literal["crop", "flip"]
SHIFT = 8  # a crop shifts an image by up to 1 / SHIFT of its size


def augment(x_NCHW: Tensor, kinds: Sequence[Augmentation], key: Key) -> Tensor:
    """Return the images, each changed by its own draws; the edge is filled with its border."""
    if "crop" in kinds:
        x_NCHW = _crop(x_NCHW, key.of("crop").torch())
    if "flip" in kinds:
        is_flipped_N = torch.rand(len(x_NCHW), generator=key.of("flip").torch()) < 0.5
        x_NCHW = torch.where(is_flipped_N[:, None, None, None], x_NCHW.flip(-1), x_NCHW)
    return x_NCHW


def _crop(x_NCHW: Tensor, generator: torch.Generator) -> Tensor:
    N, _, H, W = x_NCHW.shape
    high, wide = max(1, H // SHIFT), max(1, W // SHIFT)
    padded = F.pad(x_NCHW, (wide, wide, high, high), mode="replicate")
    top_N = torch.randint(0, 2 * high + 1, (N,), generator=generator)
    left_N = torch.randint(0, 2 * wide + 1, (N,), generator=generator)
    row_NH1 = (top_N[:, None] + torch.arange(H))[:, :, None]
    column_N1W = (left_N[:, None] + torch.arange(W))[:, None, :]
    example_N11 = torch.arange(N)[:, None, None]
    # advanced indices around a slice come first: [N, H, W, C]
    return padded[example_N11, :, row_NH1, column_N1W].permute(0, 3, 1, 2).contiguous()
