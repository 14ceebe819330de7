"""The plain model and its batches."""

import torch

from fedspd.bench import plain


def test_plain_model_is_the_papers():
    """Convolutions 10 x 25 + 10 and 20 x 250 + 20, dense layers 980 x 50 + 50 and 50 x 10 + 10."""
    parameters = sum(p.numel() for p in plain.PlainCNN().parameters())
    assert parameters == 260 + 5020 + 49050 + 510


def test_plain_batches_cover_every_epoch():
    assert [len(batch) for batch in plain.batches(120, torch.Generator())] == [50, 50, 20] * 5
