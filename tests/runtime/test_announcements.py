"""The announcements of all blocks as one."""

from dataclasses import replace

import pytest
import torch

from fedspd.core.errors import MethodError
from fedspd.core.exchange import Exchange
from fedspd.runtime.announcements import Announcements

ONE = torch.zeros(2, 1, dtype=torch.long)
OFFER = Exchange(ONE, torch.zeros(2, 1, 5), torch.ones(2, 1), ONE)


@pytest.mark.parametrize(
    "other",
    [
        replace(OFFER, model_CKP=torch.zeros(2, 1, 6)),
        replace(OFFER, want_CM=ONE.expand(2, 2)),
        replace(OFFER, is_model=False),
    ],
)
def test_blocks_that_make_different_exchanges_are_refused(other):
    with pytest.raises(MethodError, match="exchanges of different shapes in different blocks"):
        Announcements.merge([Announcements.of(OFFER), Announcements.of(other)])
