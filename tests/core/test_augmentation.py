"""Augmentation of images on tensors, from a key."""

import pytest
import torch
from torch import nn

import fedspd
from fedspd.core.augmentation import augment
from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.core.learner import Learner, TrainingOptions, squared_error

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


def test_every_client_and_round_has_draws_of_its_own():
    """Two clients have the same images in one batch, so that nothing but the draws can differ."""

    def slope() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 1, bias=False), nn.Flatten(0))

    training = TrainingOptions(batch=40, epochs=1)
    learner = Learner(slope, training, squared_error, augmentations=["flip"])
    x, y = torch.arange(4.0).expand(40, 1, 1, 4), torch.arange(40.0) / 40
    data, zero_C4 = Block([3, 4], 5, [x, x], [y, y], 40), torch.zeros(2, 4)
    third, fourth = learner.train(zero_C4, data, Key(0, round=2))
    assert not torch.allclose(third, fourth)
    assert torch.equal(learner.train(zero_C4[:1], data.select([1]), Key(0, round=2))[0], fourth)
    assert not torch.allclose(learner.train(zero_C4, data, Key(0, round=3))[1], fourth)


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
