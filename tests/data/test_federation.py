"""The data of all clients: rows, blocks, order and description."""

import json

import numpy as np
import pytest
import torch

from fedspd.core.keys import Key
from fedspd.data.federation import (
    Distribution,
    Federation,
    Partition,
    convert_images,
    description_hash,
    gather,
)
from fedspd.data.options import DataOptions
from fedspd.data.partitioning import federate
from fedspd.data.sources import Examples, Source


def noise(count: int, seed: int) -> Examples:
    random = np.random.default_rng(seed)
    return Examples(
        random.integers(0, 256, (count, 1, 3, 3), dtype=np.uint8), random.integers(0, 10, count)
    )


SOURCE = Source("noise", noise(900, 0), noise(300, 1), 10)


@pytest.fixture
def federation() -> Federation:
    return federate(SOURCE, DataOptions(examples=50, imbalance=4.0), 6, Key(7))


def test_gather_transforms_and_scales_examples() -> None:
    images = np.array([[[[0, 255], [51, 102]]], [[[255, 255], [0, 0]]]], dtype=np.uint8)
    distributions = [
        Distribution("plain"),
        Distribution("rotated", degrees=90),
        Distribution("permuted", relabel=(1, 2, 0)),
    ]
    partition = Partition(np.array([0, 2, 3]), np.array([0, 0, 1]), np.array([0, 1, 2]))
    part = gather([Examples(images, np.array([0, 1]))], distributions, partition)
    expected = torch.tensor([[[-1, 1], [-0.6, -0.2]], [[1, -0.2], [-1, -0.6]], [[1, 1], [-1, -1]]])
    assert torch.allclose(part.x[:, 0], expected)
    assert part.y.tolist() == [0, 0, 2]
    assert part.x.dtype == torch.float32
    assert part.y.dtype == torch.int64
    assert part.x.is_contiguous()


def test_convert_images_interpolates_pixels_and_repeats_channels() -> None:
    image = np.array([[[[0, 100], [0, 100]]]], dtype=np.uint8)
    converted = convert_images(image, (3, 4, 4))
    assert converted.dtype == np.uint8
    assert converted.shape == (1, 3, 4, 4)
    assert (converted == np.array([0, 25, 75, 100])).all()


def test_block_is_a_view_of_the_clients_rows(federation: Federation) -> None:
    blocks = federation.block([4, 1]), federation.block([4, 1], "test")
    for block, part in zip(blocks, (federation.train, federation.test), strict=True):
        assert list(block.clients) == [4, 1]
        assert block.network_size == 6
        assert block.width == np.diff(part.start).max()
        for client, x, y in zip(block.clients, block.x, block.y, strict=True):
            first, last = part.start[client], part.start[client + 1]
            assert torch.equal(x, part.x[first:last])
            assert torch.equal(y, part.y[first:last])
            assert x.data_ptr() == part.x[first].data_ptr()


def test_block_has_no_truth(federation: Federation) -> None:
    assert not hasattr(federation.block([0]), "truth")


def test_federation_has_the_shape_and_amounts_asked_for(federation: Federation) -> None:
    assert federation.shape == (1, 3, 3)
    assert federation.clients == 6
    assert len(federation.train.y) == 300
    assert len(federation.test.y) == 6 * 17  # 50 * 300 / 900, rounded
    assert sorted(np.diff(federation.train.start)) == [20, 20, 50, 50, 80, 80]


def test_order_of_examples_is_independent_of_the_truth() -> None:
    """Over 400 clients, both halves of the rows have as many of the second distribution."""
    source = Source("noise", noise(9000, 0), noise(4500, 1), 10)
    for mixture in ("rotation", "parity"):
        examples = 20 if mixture == "rotation" else 18
        options = DataOptions(mixture=mixture, examples=examples, test_examples=10)
        federation = federate(source, options, 400, Key(11))
        for part in (federation.train, federation.test):
            truth_CE = part.truth.reshape(400, -1)
            half = truth_CE.shape[1] // 2
            gap_C = truth_CE[:, :half].mean(axis=1) - truth_CE[:, half:].mean(axis=1)
            assert gap_C.std() > 0.05
            assert abs(gap_C.mean()) < 3 * gap_C.std() / 20  # three standard errors
            assert abs(truth_CE[:, 0].mean() - truth_CE.mean()) < 3 * 0.5 / 20


def test_description_counts_each_clients_examples(federation: Federation) -> None:
    for client, entry in enumerate(federation.description["clients"]):
        for name, part in (("train", federation.train), ("test", federation.test)):
            first, last = entry[name]["rows"]
            assert [first, last] == part.start[client : client + 2].tolist()
            counts = np.bincount(part.truth[first:last], minlength=2)
            assert entry[name]["counts"] == counts.tolist()
    assert federation.description["options"]["imbalance"] == 4.0
    assert federation.description["seed"] == 7
    names = [each["name"] for each in federation.description["distributions"]]
    assert names == ["plain", "rotated"]


def test_description_survives_json_with_its_hash(federation: Federation) -> None:
    again = json.loads(json.dumps(federation.description))
    assert again == federation.description
    assert description_hash(again) == federation.description["hash"]
    again["clients"][0]["train"]["counts"][0] += 1
    assert description_hash(again) != federation.description["hash"]


def test_description_hash_depends_on_seed_options_and_every_pixel() -> None:
    options = DataOptions(examples=50)
    one_pixel = SOURCE.train.x.copy()
    one_pixel[0, 0, 0, 0] ^= 1
    changed = Source("noise", Examples(one_pixel, SOURCE.train.y), SOURCE.test, 10)
    descriptions = [
        federate(SOURCE, options, 6, Key(0)).description,
        federate(SOURCE, options, 6, Key(1)).description,
        federate(SOURCE, DataOptions(examples=51), 6, Key(0)).description,
        federate(changed, options, 6, Key(0)).description,
    ]
    assert len({description["hash"] for description in descriptions}) == 4
    assert federate(SOURCE, options, 6, Key(0)).description == descriptions[0]
    one, other = (each["clients"][0]["train"]["sha256"] for each in descriptions[:2])
    assert one != other


def test_federate_keeps_float64():
    x, y = np.linspace(0, 1, 40).reshape(20, 2), np.linspace(1, 2, 20)
    source = Source("exact", Examples(x, y), Examples(x, y), 0)
    part = federate(source, DataOptions(mixture="iid", examples=4), 2, Key(0)).train
    assert part.x.dtype == part.y.dtype == torch.float64
    assert set(part.y.tolist()) <= set(y.tolist())
