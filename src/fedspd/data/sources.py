"""Datasets by name, read from their official files in one folder.

digits                  part of scikit-learn; nothing to download
mnist, fashion-mnist    FOLDER/NAME/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz
emnist-SPLIT            FOLDER/emnist/emnist-SPLIT-{train,test}-{images-idx3,labels-idx1}-ubyte.gz,
                        or the same files in FOLDER/emnist/gzip
cifar10                 FOLDER/cifar10/cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin
cifar100                FOLDER/cifar100/cifar-100-binary/{train,test}.bin

FOLDER is an argument, else the environment's FEDSPD_DATA, else ~/.cache/fedspd.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspd.core.errors import DataError, nearest
from fedspd.data import formats


@dataclass(frozen=True)
class Examples:
    """Inputs and targets.

    x   [n, channels, height, width] uint8 for images; else [n, ...] float32 or float64
    y   [n] int64 class labels; or [n] or [n, d] float32 or float64 for regression
    """

    x: NDArray[Any]
    y: NDArray[Any]


@dataclass(frozen=True)
class Owners:
    """The clients that the data came with: their names, and the client of each example."""

    names: tuple[str, ...]
    train: NDArray[np.int64]
    test: NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """A dataset in memory.

    classes      their number; 0 means regression
    class_names  their names, where they are not 0, 1, 2, ...
    owners       whose examples these are, where the data have clients of their own
    notes        sentences about guesses that could be wrong
    has_columns  whether the examples came from columns with names
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    class_names: tuple[str, ...] = ()
    owners: Owners | None = None
    notes: tuple[str, ...] = ()
    has_columns: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return self.train.x.shape[1:]


@dataclass(frozen=True)
class DatasetPart:
    """The number of examples in the official files, these files, and their reader."""

    examples: int
    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], Examples]


@dataclass(frozen=True)
class DatasetSpec:
    """An official dataset: where its files are and what is in them."""

    folder: str
    classes: int
    shape: tuple[int, int, int]
    train: DatasetPart
    test: DatasetPart

    @property
    def files(self) -> tuple[str, ...]:
        """The names of all files."""
        return self.train.files + self.test.files


def load_dataset(name: str, folder: Path | None = None) -> Source:
    """Return an official dataset from the data folder."""
    return read_dataset(name, dataset_folder(name, folder))


def read_dataset(name: str, folder: Path) -> Source:
    """Return an official dataset whose files are in `folder`."""
    spec = dataset_spec(name)
    train, test = (
        part.read([_require_file(name, folder, file) for file in part.files])
        for part in (spec.train, spec.test)
    )
    return Source(ALIASES.get(name, name), train, test, spec.classes)


def is_official(name: str) -> bool:
    """Return whether an official dataset has this name."""
    return ALIASES.get(name, name) in DATASETS


def dataset_spec(name: str) -> DatasetSpec:
    """Return the specification of an official dataset."""
    if not is_official(name):
        raise DataError(f"'{name}': unknown dataset; {nearest(name, DATASETS)}")
    return DATASETS[ALIASES.get(name, name)]


def dataset_folder(name: str, folder: Path | None = None) -> Path:
    """Return the folder of a dataset's files."""
    return data_folder(folder) / dataset_spec(name).folder


def data_folder(folder: Path | None = None) -> Path:
    """Return the folder of all datasets."""
    if folder is not None:
        return folder
    if chosen := os.environ.get("FEDSPD_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedspd"


def is_present(name: str, folder: Path | None = None) -> bool:
    """Return whether all files of a dataset are there."""
    return all(find_file(dataset_folder(name, folder), file) for file in dataset_spec(name).files)


def find_file(folder: Path, file: str) -> Path | None:
    """Return the path of an official file, gzipped or not, or None.

    It may also be where archives and other tools put it.
    """
    for path in (folder / file, folder / Path(file).name, folder / "gzip" / file):
        for variant in (path, path.with_name(path.name.removesuffix(".gz"))):
            if variant.is_file():
                return variant
    return None


def reject_pickles(name: str, folder: Path) -> None:
    """Raise an error that says why CIFAR's Python version does not help, if it is there."""
    for pickled in ("cifar-10-batches-py", "cifar-10-python*", "cifar-100-python*"):
        if name.startswith("cifar") and (found := next(folder.glob(pickled), None)):
            raise DataError(
                f"'{found}': the Python version of CIFAR, which is pickled, and pickles are never "
                f"loaded; expected the binary version. Get it with 'fedspd data get {name}'."
            )


def fingerprint(source: Source) -> str:
    """Return the SHA-256 of all values of a source, with their types and shapes."""
    digest = hashlib.sha256(str(source.classes).encode())
    arrays = [source.train.x, source.train.y, source.test.x, source.test.y]
    if source.class_names:
        digest.update(repr(source.class_names).encode())
    if source.owners is not None:
        digest.update(repr(source.owners.names).encode())
        arrays += [source.owners.train, source.owners.test]
    for array in arrays:
        digest.update(repr((array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _require_file(name: str, folder: Path, file: str) -> Path:
    path = find_file(folder, file)
    if path is None:
        reject_pickles(name, folder)
        raise DataError(
            f"'{name}': no file {Path(file).name} in {folder}. Get the dataset with "
            f"'fedspd data get {name}', copy files that you have with 'fedspd data get {name} "
            f"--from DIR', or set FEDSPD_DATA to the folder that contains {folder.name}/."
        )
    return path


def _digits(paths: Sequence[Path], *, test: bool) -> Examples:
    """Return scikit-learn's digits: every fifth of a class is for testing, 0..16 become 0..255."""
    table = np.loadtxt(_digits_path(), delimiter=",", dtype=np.uint8)
    value_NP, label_N = table[:, :-1], table[:, -1]
    rank_N = np.empty(len(label_N), np.int64)  # of an example within its class
    for label in range(10):
        is_label = label_N == label
        rank_N[is_label] = np.arange(is_label.sum())
    chosen = (rank_N % 5 == 4) == test
    x_NCHW = np.rint(value_NP[chosen] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return Examples(x_NCHW, label_N[chosen].astype(np.int64))


def _digits_path() -> Path:
    """Return the file of the digits, without the second that an import of scikit-learn takes."""
    package = find_spec("sklearn")
    folders = [] if package is None else package.submodule_search_locations or []
    for folder in folders:
        if (path := Path(folder) / "datasets" / "data" / "digits.csv.gz").exists():
            return path
    raise DataError("'digits': scikit-learn, which contains them, is not installed. Install it.")


def _idx(paths: Sequence[Path], classes: int) -> Examples:
    return Examples(*formats.idx(*paths, classes=classes))


def _emnist(paths: Sequence[Path], classes: int, first: int) -> Examples:
    return Examples(*formats.emnist(*paths, classes=classes, first=first))


def _cifar(paths: Sequence[Path], label_ranges: tuple[int, ...]) -> Examples:
    return Examples(*formats.cifar(paths, label_ranges))


def _idx_files(prefix: str) -> tuple[str, str]:
    return f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"


def _mnist_like(folder: str) -> DatasetSpec:
    read = partial(_idx, classes=10)
    return DatasetSpec(
        folder,
        10,
        (1, 28, 28),
        DatasetPart(60_000, _idx_files("train"), read),
        DatasetPart(10_000, _idx_files("t10k"), read),
    )


def _emnist_split(split: str, classes: int, train: int, test: int) -> DatasetSpec:
    read = partial(_emnist, classes=classes, first=1 if split == "letters" else 0)
    parts = (
        DatasetPart(count, _idx_files(f"emnist-{split}-{part}"), read)
        for count, part in ((train, "train"), (test, "test"))
    )
    return DatasetSpec("emnist", classes, (1, 28, 28), *parts)


def _cifar_like(
    folder: str, subfolder: str, train: Sequence[str], test: str, label_ranges: tuple[int, ...]
) -> DatasetSpec:
    read = partial(_cifar, label_ranges=label_ranges)
    train_files = tuple(f"{subfolder}/{file}.bin" for file in train)
    return DatasetSpec(
        folder,
        label_ranges[-1],
        (3, 32, 32),
        DatasetPart(50_000, train_files, read),
        DatasetPart(10_000, (f"{subfolder}/{test}.bin",), read),
    )


ALIASES = {"emnist": "emnist-letters"}
DATASETS: dict[str, DatasetSpec] = {
    "digits": DatasetSpec(
        "",
        10,
        (1, 8, 8),
        DatasetPart(1_442, (), partial(_digits, test=False)),
        DatasetPart(355, (), partial(_digits, test=True)),
    ),
    "mnist": _mnist_like("mnist"),
    "fashion-mnist": _mnist_like("fashion-mnist"),
    "emnist-letters": _emnist_split("letters", 26, 124_800, 20_800),
    "emnist-balanced": _emnist_split("balanced", 47, 112_800, 18_800),
    "emnist-byclass": _emnist_split("byclass", 62, 697_932, 116_323),
    "emnist-bymerge": _emnist_split("bymerge", 47, 697_932, 116_323),
    "emnist-digits": _emnist_split("digits", 10, 240_000, 40_000),
    "emnist-mnist": _emnist_split("mnist", 10, 60_000, 10_000),
    "cifar10": _cifar_like(
        "cifar10",
        "cifar-10-batches-bin",
        [f"data_batch_{n}" for n in range(1, 6)],
        "test_batch",
        (10,),
    ),
    "cifar100": _cifar_like("cifar100", "cifar-100-binary", ["train"], "test", (20, 100)),
}
