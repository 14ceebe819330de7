"""What a block says of its clients' examples."""

import torch

from fedspd.core.block import Block


def test_block_counts_examples_and_marks_the_present_ones():
    y = [torch.zeros(2), torch.zeros(0), torch.zeros(3)]
    block = Block([4, 5, 6], 10, [one[:, None] for one in y], y, width=4)
    assert len(block) == 3
    assert block.counts_C.tolist() == [2, 0, 3]
    assert block.present_CE.tolist() == [
        [True, True, False, False],
        [False] * 4,
        [True, True, True, False],
    ]
