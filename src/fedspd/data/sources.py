"""Datasets by name, read from the official files in one folder.

    digits                     ships with scikit-learn; nothing to download
    mnist, fashion-mnist       FOLDER/NAME/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz
    emnist-SPLIT               FOLDER/emnist/emnist-SPLIT-{train,test}-{images-idx3,labels-idx1}-ubyte.gz, or in a subfolder gzip/
    cifar10                    FOLDER/cifar10/cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin
    cifar100                   FOLDER/cifar100/cifar-100-binary/{train,test}.bin

FOLDER is an argument, else the environment's FEDSPD_DATA, else ~/.cache/fedspd.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspd.core.errors import DataError, nearest
from fedspd.data import formats


@dataclass(frozen=True)
class Examples:
    """x: [n, channels, height, width] uint8 for images; [n, ...] float32 or float64 for anything else.
    y: [n] int64 class labels; or float32 or float64 [n] or [n, d], the targets of a regression.
    """

    x: NDArray[Any]
    y: NDArray[Any]


@dataclass(frozen=True)
class Source:
    """A dataset in memory. classes = 0 means regression."""

    name: str
    train: Examples
    test: Examples
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return self.train.x.shape[1:]


@dataclass(frozen=True)
class SourcePart:
    """How many examples the official files hold, which files, and how to read them."""

    examples: int
    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], Examples]


@dataclass(frozen=True)
class Official:
    folder: str
    classes: int
    shape: tuple[int, int, int]
    train: SourcePart
    test: SourcePart

    @property
    def files(self) -> tuple[str, ...]:
        return self.train.files + self.test.files


def load(name: str, folder: Path | None = None) -> Source:
    return read(name, home(name, folder))


def read(name: str, base: Path) -> Source:
    """The dataset whose files lie in `base`."""
    official = lookup(name)
    train, test = (
        part.read([_require(name, base, file) for file in part.files])
        for part in (official.train, official.test)
    )
    return Source(ALIASES.get(name, name), train, test, official.classes)


def lookup(name: str) -> Official:
    official = OFFICIAL.get(ALIASES.get(name, name))
    if official is None:
        raise DataError(f"There is no dataset '{name}'; {nearest(name, OFFICIAL)}")
    return official


def home(name: str, folder: Path | None = None) -> Path:
    """Where a dataset's files belong."""
    return data_folder(folder) / lookup(name).folder


def data_folder(folder: Path | None = None) -> Path:
    if folder is not None:
        return folder
    if chosen := os.environ.get("FEDSPD_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedspd"


def present(name: str, folder: Path | None = None) -> bool:
    return all(find(home(name, folder), file) for file in lookup(name).files)


def find(base: Path, file: str) -> Path | None:
    """An official file below `base`: where it belongs, or where archives and other tools put it, gzipped or not."""
    places = (base / file, base / Path(file).name, base / "gzip" / file)
    for path in (
        variant
        for place in places
        for variant in (place, place.with_name(place.name.removesuffix(".gz")))
    ):
        if path.is_file():
            return path
    return None


def refuse_pickles(name: str, base: Path) -> None:
    """Say why the Python version of CIFAR does not help, where it is all that a user has."""
    for pickled in ("cifar-10-batches-py", "cifar-10-python*", "cifar-100-python*"):
        if name.startswith("cifar") and (found := next(base.glob(pickled), None)):
            raise DataError(
                f"{found} is the Python version of CIFAR, which is pickled, and pickles are never loaded: "
                f"the binary version is needed, as `fedspd data get {name}` fetches it."
            )


def fingerprint(source: Source) -> str:
    """SHA-256 of every value of a source, with types and shapes."""
    digest = hashlib.sha256(str(source.classes).encode())
    for array in (source.train.x, source.train.y, source.test.x, source.test.y):
        digest.update(repr((array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _require(name: str, base: Path, file: str) -> Path:
    path = find(base, file)
    if path is None:
        refuse_pickles(name, base)
        raise DataError(
            f"The dataset '{name}' needs {Path(file).name}, which is not in {base}: fetch it with `fedspd data get {name}`, "
            f"add `--from DIR` if you have the files, or set FEDSPD_DATA to the folder that holds {base.name}/."
        )
    return path


def _digits(paths: Sequence[Path], *, test: bool) -> Examples:
    """Every fifth example of each class is for testing; values 0..16 become 0..255."""
    from sklearn.datasets import load_digits

    value_NP, label_N = load_digits(return_X_y=True)
    rank_N = np.empty(len(label_N), np.int64)  # an example's place among those of its class
    for label in range(10):
        mine = label_N == label
        rank_N[mine] = np.arange(mine.sum())
    chosen = (rank_N % 5 == 4) == test
    x_NCHW = np.rint(value_NP[chosen] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return Examples(x_NCHW, label_N[chosen].astype(np.int64))


def _idx(paths: Sequence[Path], classes: int) -> Examples:
    return Examples(*formats.idx(*paths, classes=classes))


def _emnist(paths: Sequence[Path], classes: int, first: int) -> Examples:
    return Examples(*formats.emnist(*paths, classes=classes, first=first))


def _cifar(paths: Sequence[Path], label_ranges: tuple[int, ...]) -> Examples:
    return Examples(*formats.cifar(paths, label_ranges))


def _idx_files(prefix: str) -> tuple[str, str]:
    return f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"


def _mnist_like(folder: str) -> Official:
    read = partial(_idx, classes=10)
    return Official(
        folder,
        10,
        (1, 28, 28),
        SourcePart(60_000, _idx_files("train"), read),
        SourcePart(10_000, _idx_files("t10k"), read),
    )


def _emnist_split(split: str, classes: int, train: int, test: int) -> Official:
    read = partial(_emnist, classes=classes, first=1 if split == "letters" else 0)
    parts = (
        SourcePart(count, _idx_files(f"emnist-{split}-{part}"), read)
        for count, part in ((train, "train"), (test, "test"))
    )
    return Official("emnist", classes, (1, 28, 28), *parts)


def _cifar_like(
    folder: str, inside: str, train: Sequence[str], test: str, label_ranges: tuple[int, ...]
) -> Official:
    read = partial(_cifar, label_ranges=label_ranges)
    train_files = tuple(f"{inside}/{file}.bin" for file in train)
    return Official(
        folder,
        label_ranges[-1],
        (3, 32, 32),
        SourcePart(50_000, train_files, read),
        SourcePart(10_000, (f"{inside}/{test}.bin",), read),
    )


ALIASES = {"emnist": "emnist-letters"}
OFFICIAL: dict[str, Official] = {
    "digits": Official(
        "",
        10,
        (1, 8, 8),
        SourcePart(1_442, (), partial(_digits, test=False)),
        SourcePart(355, (), partial(_digits, test=True)),
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
