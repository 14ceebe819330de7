"""Datasets by name: small copies of the official files, and the real ones in FEDSPD_DATA."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from fedspd.core.errors import DataError
from fedspd.data.sources import (
    DATASETS,
    Examples,
    Source,
    data_folder,
    fingerprint,
    is_present,
    load_dataset,
)

REAL = os.environ.get("FEDSPD_DATA")
needs_real_files = pytest.mark.skipif(
    not REAL, reason="needs the real files: set FEDSPD_DATA to their folder"
)


def idx_bytes(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write_idx_files(folder: Path, files: tuple[str, ...], labels: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images = np.arange(len(labels))[:, None, None] * np.ones((1, 28, 28))
    for file in files:
        (folder / file).write_bytes(
            gzip.compress(idx_bytes(images if "images" in file else np.array(labels)))
        )


def test_digits_are_split_by_class_and_scaled_to_bytes():
    digits = load_dataset("digits")
    assert (digits.shape, digits.classes) == ((1, 8, 8), 10)
    assert (len(digits.train.y), len(digits.test.y)) == (1442, 355)
    assert digits.train.x.dtype == np.uint8
    assert digits.train.y.dtype == np.int64
    assert (digits.train.x.min(), digits.train.x.max()) == (0, 255)
    assert np.bincount(digits.test.y).tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]


def test_digits_contain_every_example_once():
    from sklearn.datasets import load_digits

    ours = load_dataset("digits")
    total = np.concatenate([ours.train.x, ours.test.x]).astype(np.int64).sum()
    assert total == np.rint(load_digits().data * 255 / 16).astype(np.int64).sum()
    assert fingerprint(ours) == fingerprint(load_dataset("digits"))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_load_dataset_reads_mnist_files(tmp_path, name):
    write_idx_files(tmp_path / name, DATASETS[name].train.files, [5, 0, 4])
    write_idx_files(tmp_path / name, DATASETS[name].test.files, [7, 2])
    source = load_dataset(name, tmp_path)
    assert (source.name, source.classes, source.shape) == (name, 10, (1, 28, 28))
    assert source.train.y.tolist() == [5, 0, 4]
    assert source.test.y.tolist() == [7, 2]
    assert source.train.x[:, 0, 3, 4].tolist() == [0, 1, 2]
    assert is_present(name, tmp_path)


def test_load_dataset_reads_uncompressed_files(tmp_path):
    write_idx_files(tmp_path / "mnist", DATASETS["mnist"].files, [1, 2])
    for path in (tmp_path / "mnist").iterdir():
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert load_dataset("mnist", tmp_path).test.y.tolist() == [1, 2]


@pytest.mark.parametrize("subfolder", ["", "gzip"])
@pytest.mark.parametrize(
    ("name", "labels", "expected", "classes"),
    [
        ("emnist", [1, 26], [0, 25], 26),
        ("emnist-letters", [1, 26], [0, 25], 26),
        ("emnist-balanced", [0, 46], [0, 46], 47),
        ("emnist-byclass", [0, 61], [0, 61], 62),
        ("emnist-bymerge", [0, 46], [0, 46], 47),
        ("emnist-digits", [0, 9], [0, 9], 10),
        ("emnist-mnist", [0, 9], [0, 9], 10),
    ],
)
def test_load_dataset_reads_emnist_files(tmp_path, subfolder, name, labels, expected, classes):
    split = "letters" if name == "emnist" else name.removeprefix("emnist-")
    files = [
        f"emnist-{split}-{part}-{kind}-ubyte.gz"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    ]
    write_idx_files(tmp_path / "emnist" / subfolder, tuple(files), labels)
    source = load_dataset(name, tmp_path)
    assert (source.name, source.classes) == (f"emnist-{split}", classes)
    assert source.train.y.tolist() == source.test.y.tolist() == expected


def test_load_dataset_reads_cifar_files(tmp_path):
    for folder, files, labels in (
        (
            "cifar10/cifar-10-batches-bin",
            [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"],
            [8],
        ),
        ("cifar100/cifar-100-binary", ["train", "test"], [1, 42]),
    ):
        (tmp_path / folder).mkdir(parents=True)
        for file in files:
            (tmp_path / folder / f"{file}.bin").write_bytes(bytes(labels) + bytes(3072))
    ten, hundred = load_dataset("cifar10", tmp_path), load_dataset("cifar100", tmp_path)
    assert (ten.classes, ten.shape) == (10, (3, 32, 32))
    assert (ten.train.y.tolist(), ten.test.y.tolist()) == ([8] * 5, [8])
    assert (hundred.classes, hundred.train.y.tolist(), hundred.test.y.tolist()) == (100, [42], [42])


def test_load_dataset_says_how_to_get_a_missing_dataset(tmp_path):
    with pytest.raises(DataError) as caught:
        load_dataset("mnist", tmp_path)
    for part in (
        "train-images-idx3-ubyte.gz",
        str(tmp_path / "mnist"),
        "fedspd data get mnist",
        "--from DIR",
        "FEDSPD_DATA",
    ):
        assert part in str(caught.value)
    assert not is_present("mnist", tmp_path)


def test_load_dataset_names_a_missing_file(tmp_path):
    write_idx_files(tmp_path / "mnist", DATASETS["mnist"].files, [1, 2])
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"^\'mnist\': no file t10k-labels-idx1-ubyte\.gz in "):
        load_dataset("mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "pickled"),
    [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python.tar.gz")],
)
def test_load_dataset_rejects_pickled_cifar(tmp_path, name, pickled):
    (tmp_path / name / pickled).mkdir(parents=True)
    with pytest.raises(DataError, match="pickles are never loaded; expected the binary version"):
        load_dataset(name, tmp_path)


def test_load_dataset_suggests_the_nearest_name():
    with pytest.raises(
        DataError, match="'fashon-mnist': unknown dataset; did you mean 'fashion-mnist'"
    ):
        load_dataset("fashon-mnist")


def test_data_folder_is_the_argument_then_the_environment_then_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSPD_DATA", str(tmp_path / "chosen"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder(tmp_path) == tmp_path
    assert data_folder() == tmp_path / "chosen"
    monkeypatch.delenv("FEDSPD_DATA")
    assert data_folder() == tmp_path / "cache" / "fedspd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == Path.home() / ".cache" / "fedspd"


def test_fingerprint_depends_on_every_value_type_and_shape():
    def source(x: np.ndarray, classes: int = 2) -> Source:
        part = Examples(x, np.array([0, 1]))
        return Source("any", part, part, classes)

    x = np.zeros((2, 4), np.float32)
    changed = x.copy()
    changed[1, 3] = 1
    variants = [
        source(x),
        source(changed),
        source(x.astype(np.float64)),
        source(x.reshape(2, 2, 2)),
        source(x, 3),
    ]
    assert len({fingerprint(variant) for variant in variants}) == 5
    assert fingerprint(source(x)) == fingerprint(source(np.asfortranarray(x)))


@needs_real_files
@pytest.mark.parametrize(
    ("name", "first_labels", "mean"),
    [
        ("mnist", [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], 0.1307),
        ("fashion-mnist", [9, 0, 0, 3, 0, 2, 7, 2, 5, 5], 0.2860),
    ],
)
def test_real_mnist_and_fashion_mnist_have_the_known_content(name, first_labels, mean):
    source = load_dataset(name)
    assert (source.train.x.shape, source.test.x.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert source.train.y[:10].tolist() == first_labels
    assert source.train.x.mean() / 255 == pytest.approx(mean, abs=5e-5)
    if name == "fashion-mnist":
        assert np.bincount(source.train.y).tolist() == [6000] * 10
    else:
        per_class = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
        assert np.bincount(source.test.y).tolist() == per_class


@needs_real_files
@pytest.mark.parametrize(
    ("name", "classes", "mean"),
    [("cifar10", 10, [0.4914, 0.4822, 0.4465]), ("cifar100", 100, [0.5071, 0.4866, 0.4409])],
)
def test_real_cifar_has_the_known_content(name, classes, mean):
    source = load_dataset(name)
    assert (source.train.x.shape, source.test.x.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert np.bincount(source.train.y).tolist() == [50_000 // classes] * classes
    assert np.bincount(source.test.y).tolist() == [10_000 // classes] * classes
    channel_mean = [source.train.x[:, channel].mean() / 255 for channel in range(3)]
    assert channel_mean == pytest.approx(mean, abs=6e-5)
    if name == "cifar10":
        assert source.train.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
