"""Draws that follow from their name alone."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspd.core.keys import Key

names = st.lists(
    st.one_of(st.integers(0, 99), st.sampled_from(["a", "b", "1", "2"])), max_size=3
).map(tuple)
keys = st.builds(Key, st.integers(0, 9), st.integers(0, 9), names)


@given(keys, keys)
def test_keys_draw_the_same_only_under_the_same_name(one, other):
    assert (one.number() == other.number()) == (one == other)
    assert 0 <= one.number() < 2**63


def test_key_gives_the_number_known_from_before():
    """A change here would change every result that anybody recorded."""
    assert Key(1, 2, (3, "train")).number() == 8092944203448518147


def test_key_depends_on_its_path_of_names_and_its_round():
    key = Key(7)
    assert key.of(3, "train") == key.of(3).of("train")
    assert key.at(2).of(3) == key.of(3).at(2)
    assert (
        len(
            {
                key.number(),
                key.at(1).number(),
                key.of(1).number(),
                key.of("1").number(),
                Key(8).number(),
            }
        )
        == 5
    )


def test_key_ignores_the_type_of_an_integer_name():
    assert Key(np.int64(7), np.int32(2), (np.int64(3),)).number() == Key(7, 2, (3,)).number()


def test_generators_restart_every_time_and_differ_by_name():
    key = Key(7)
    assert key.numpy().random(3).tolist() == key.numpy().random(3).tolist()
    assert key.numpy().random(3).tolist() != key.of("other").numpy().random(3).tolist()
    assert torch.equal(torch.rand(3, generator=key.torch()), torch.rand(3, generator=key.torch()))
    assert not torch.equal(
        torch.rand(3, generator=key.torch()), torch.rand(3, generator=key.at(1).torch())
    )
