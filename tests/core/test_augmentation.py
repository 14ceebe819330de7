"""Augmentation of images on tensors, from a key."""

import pytest
import torch

import fedspd
from fedspd.core.augmentation import augment
from fedspd.core.keys import Key

X = torch.arange(3 * 2 * 8 * 8, dtype=torch.float32).reshape(3, 2, 8, 8)


def test_flip_mirrors_about_half_of_the_images():
    x = torch.arange(4.0).expand(400, 1, 1, 4)
    flipped = augment(x, ["flip"], Key(0))[:, 0, 0, 0] == 3
    assert 150 < flipped.sum() < 250
    assert torch.equal(augment(x, ["flip"], Key(0))[:, 0, 0, 0] == 3, flipped)


def test_crop_shifts_by_at_most_an_eighth_and_repeats_the_border():
    shifts = set()
    for seed in range(30):
        for before, after in zip(X, augment(X, ["crop"], Key(seed)), strict=True):
            down, right = (int(d) for d in divmod(float(after[0, 4, 4] - before[0, 4, 4]), 8))
            right, down = (right - 8, down + 1) if right > 1 else (right, down)
            shifts.add((down, right))
            rows = (torch.arange(8) + down).clamp(0, 7)
            columns = (torch.arange(8) + right).clamp(0, 7)
            assert torch.equal(after, before[:, rows][:, :, columns])
    assert shifts == {(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)}


@pytest.mark.parametrize("method", ["fedavg", "fedspd-split"])
def test_augmented_run_does_not_depend_on_workers(method):
    config = {"clients": 4, "rounds": 4, "method": method, "data": {"examples": 10}}
    plain = fedspd.run(config).summary["hash"]
    augmented = {**config, "data": {"examples": 10, "augment": ["crop", "flip"]}}
    hashes = {fedspd.run(augmented, workers=workers).summary["hash"] for workers in (1, 2)}
    assert len(hashes | {plain}) == 2


def test_augmentation_of_tables_is_refused():
    config = {"clients": 2, "data": {"augment": ["flip"]}}
    with pytest.raises(fedspd.FedspdError, match=r"data.augment = \['flip'\]: examples of shape"):
        fedspd.run(config, data=(torch.rand(40, 3), torch.arange(40) % 2))
