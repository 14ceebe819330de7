"""The official file formats, on files small enough to check by eye."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspd.core.errors import DataError
from fedspd.data import formats

RAMP = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28)


def idx_bytes(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write_pair(folder: Path, images: bytes, labels: bytes) -> tuple[Path, Path]:
    paths = folder / "images", folder / "labels"
    for path, content in zip(paths, (images, labels), strict=True):
        path.write_bytes(content)
    return paths


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_returns_images_with_one_channel_and_labels(tmp_path, pack):
    paths = write_pair(tmp_path, pack(idx_bytes(RAMP)), pack(idx_bytes(np.array([7, 3]))))
    x_NCHW, y_N = formats.idx(*paths, classes=10)
    assert x_NCHW.dtype == np.uint8
    assert y_N.dtype == np.int64
    np.testing.assert_array_equal(x_NCHW, RAMP[:, None])
    assert y_N.tolist() == [7, 3]


def test_emnist_returns_upright_images_and_letters_from_zero(tmp_path):
    upright = np.zeros((1, 28, 28), np.uint8)
    upright[0, 0, 5] = 255  # in the top row
    stored = upright.transpose(0, 2, 1)
    paths = write_pair(tmp_path, idx_bytes(stored), idx_bytes(np.array([26])))
    x_NCHW, y_N = formats.emnist(*paths, classes=26, first=1)
    np.testing.assert_array_equal(x_NCHW[0, 0], upright[0])
    assert x_NCHW.flags.c_contiguous
    assert y_N.tolist() == [25]


@pytest.mark.parametrize(
    ("images", "labels", "name", "message"),
    [
        (idx_bytes(RAMP)[:-1], b"", "images", "only 1567 bytes after the header; expected 1568"),
        (idx_bytes(RAMP) + b"x", b"", "images", "more bytes after the header; expected 1568"),
        (idx_bytes(RAMP)[:9], b"", "images", "the end of the file inside the header"),
        (b"", b"", "images", "the end of the file inside the header"),
        (idx_bytes(np.array([1, 2])), b"", "images", "0x00000801; expected 0x00000803"),
        (
            struct.pack(">4I", 0x803, 2**32 - 1, 2**16, 2**16),
            b"",
            "images",
            "a header that announces",
        ),
        (struct.pack(">4I", 0x803, 0, 28, 28), b"", "images", "announces 0 bytes"),
        (gzip.compress(idx_bytes(RAMP), mtime=0)[:-9], b"", "images", "a broken gzip stream"),
        (
            gzip.compress(idx_bytes(RAMP), mtime=0) + b"malformed",
            b"",
            "images",
            "a broken gzip stream",
        ),
        (
            idx_bytes(RAMP[:, 1:]),
            idx_bytes(np.array([1, 2])),
            "images",
            "images of 27 x 28 pixels; expected 28 x 28",
        ),
        (
            idx_bytes(RAMP),
            idx_bytes(np.array([1, 2, 3])),
            "labels",
            "3 labels; expected 2, one for each image",
        ),
        (
            idx_bytes(RAMP),
            idx_bytes(np.array([1, 10])),
            "labels",
            "the label 10; expected labels from 0 to 9",
        ),
    ],
)
def test_idx_rejects_a_damaged_file_with_the_found_and_the_expected_value(
    tmp_path, images, labels, name, message
):
    paths = write_pair(tmp_path, images, labels)
    with pytest.raises(DataError) as caught:
        formats.idx(*paths, classes=10)
    assert str(tmp_path / name) in str(caught.value)
    assert message in str(caught.value)


def test_emnist_rejects_a_label_below_the_first(tmp_path):
    paths = write_pair(tmp_path, idx_bytes(RAMP), idx_bytes(np.array([0, 1])))
    with pytest.raises(DataError, match="the label 0; expected labels from 1 to 26"):
        formats.emnist(*paths, classes=26, first=1)


def test_idx_allocates_no_memory_for_a_header_that_announces_too_much(tmp_path):
    import tracemalloc

    paths = write_pair(tmp_path, struct.pack(">4I", 0x803, 2**20, 28, 28) + b"few", b"")
    tracemalloc.start()
    with pytest.raises(DataError, match="only 3 bytes"):
        formats.idx(*paths, classes=10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * formats.CHUNK_BYTES


@given(content=st.binary(max_size=64), packed=st.booleans())
def test_idx_array_reads_or_rejects_any_bytes(tmp_path_factory, content, packed):
    path = tmp_path_factory.mktemp("any") / "labels"
    path.write_bytes(gzip.compress(content) if packed else content)
    is_valid = len(content) > 8 and content[:8] == struct.pack(">2I", 0x801, len(content) - 8)
    if is_valid:
        assert formats._idx_array(path, 1).tolist() == list(content[8:])
    else:
        with pytest.raises(DataError, match="labels"):
            formats._idx_array(path, 1)


@given(labels=st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_idx_array_reads_labels_as_written(tmp_path_factory, labels):
    path = tmp_path_factory.mktemp("idx") / "labels"
    path.write_bytes(gzip.compress(idx_bytes(np.array(labels))))
    assert formats._idx_array(path, 1).tolist() == labels


def cifar_row(*labels: int) -> bytes:
    return bytes(labels) + bytes([10] * 1024 + [20] * 1024 + [30] * 1024)


def test_cifar_reads_rows_of_one_label_and_three_channels(tmp_path):
    for number, labels in enumerate([(3, 9), (0,)]):
        (tmp_path / f"{number}.bin").write_bytes(b"".join(cifar_row(label) for label in labels))
    x_NCHW, y_N = formats.cifar([tmp_path / "0.bin", tmp_path / "1.bin"], (10,))
    assert x_NCHW.shape == (3, 3, 32, 32)
    assert x_NCHW.flags.c_contiguous
    assert [set(x_NCHW[:, channel].ravel().tolist()) for channel in range(3)] == [{10}, {20}, {30}]
    assert y_N.tolist() == [3, 9, 0]


def test_cifar_returns_the_last_of_two_labels(tmp_path):
    (tmp_path / "train.bin").write_bytes(cifar_row(19, 99) + cifar_row(4, 0))
    x_NCHW, y_N = formats.cifar([tmp_path / "train.bin"], (20, 100))
    assert x_NCHW.shape == (2, 3, 32, 32)
    assert y_N.tolist() == [99, 0]


@pytest.mark.parametrize(
    ("content", "ranges", "message"),
    [
        (cifar_row(1)[:-1], (10,), "3072 bytes; expected complete rows of 3073 bytes"),
        (b"", (10,), "0 bytes"),
        (cifar_row(10), (10,), "the label 10; expected labels from 0 to 9"),
        (cifar_row(20, 5), (20, 100), "the label 20; expected labels from 0 to 19"),
        (cifar_row(1, 100), (20, 100), "the label 100"),
        (cifar_row(1), (20, 100), "3073 bytes; expected complete rows of 3074 bytes"),
    ],
)
def test_cifar_rejects_a_damaged_file(tmp_path, content, ranges, message):
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        formats.cifar([path], ranges)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_cifar_rejects_a_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.bin': cannot be read: No such file"):
        formats.cifar([tmp_path / "nowhere.bin"], (10,))
