"""A user's own data as a Source: arrays, an .npz file, a folder of images, a map-style torch dataset, or a function that makes one.

Images are [n, channels, height, width] uint8 with values 0..255; [n, height, width] uint8 gets its one channel. Anything else becomes
[n, ...] float32, or stays float64. Integer y are class labels 0, 1, 2, ...; floating-point y are the targets of a regression. Where
no test part is given, a fifth of the examples becomes it, always the same ones.

Shapes: N examples, C channels, H height, W width.
"""

import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedspd.core.errors import DataError, nearest
from fedspd.core.imports import load_object
from fedspd.core.keys import Key
from fedspd.data import formats
from fedspd.data.sources import ALIASES, OFFICIAL, Examples, Source, load

Array = NDArray[Any] | torch.Tensor

CHANNELS = (1, 3, 4)
LIKELY_CLASSES = 1000  # integers beyond this and beyond the number of examples are hardly classes
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
FACTORY = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


class MapStyle(Protocol):
    """What torch calls a map-style dataset; an item is (x, y)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def resolve(spec: object, folder: Path | None = None) -> Source:
    """A source from whatever names or is one: see the top of this file. The name of an official dataset comes first."""
    if isinstance(spec, str | Path):
        return _named(str(spec), folder)
    if isinstance(spec, Source):
        return _checked(spec)
    if (
        isinstance(spec, tuple)
        and len(spec) in (2, 4)
        and all(isinstance(part, np.ndarray | torch.Tensor) for part in spec)
    ):
        return from_arrays(*spec)
    if (
        hasattr(spec, "__len__")
        and hasattr(spec, "__getitem__")
        and not isinstance(spec, tuple | list | dict)
    ):
        return from_torch_dataset(spec)
    raise DataError(
        f"Data cannot come from a value of type {type(spec).__name__}: expected a name, a path, 'module:function', a Source, "
        "a tuple of 2 or 4 arrays (x_train, y_train, x_test, y_test), or a map-style dataset."
    )


def _named(spec: str, folder: Path | None) -> Source:
    if ALIASES.get(spec, spec) in OFFICIAL:
        return load(spec, folder)
    if spec.endswith(".npz"):
        return from_npz(Path(spec))
    if Path(spec).is_dir():
        return from_image_folder(Path(spec))
    if FACTORY.fullmatch(spec):
        return from_factory(spec)
    raise DataError(
        f"'{spec}' is no dataset, .npz file, existing folder or 'module:function'; {nearest(spec, OFFICIAL)}"
    )


def from_arrays(
    x_train: Array,
    y_train: Array,
    x_test: Array | None = None,
    y_test: Array | None = None,
    *,
    name: str = "own",
) -> Source:
    train = _examples(x_train, y_train, "train", at_least=2)
    if x_test is None and y_test is None:
        train, test = _split(train)
    elif x_test is None or y_test is None:
        raise DataError(
            f"The data '{name}' have only one of x_test and y_test: give both, or neither for a split of the training part."
        )
    else:
        test = _examples(x_test, y_test, "test", at_least=1)
    _check_agreement(train, test)
    return Source(name, train, test, _count_classes(train, test))


def _split(whole: Examples) -> tuple[Examples, Examples]:
    order = Key(0).of("own data", "test").numpy().permutation(len(whole.y))
    fifth = max(1, len(order) // 5)
    trained, tested = np.sort(order[fifth:]), np.sort(order[:fifth])
    return Examples(whole.x[trained], whole.y[trained]), Examples(whole.x[tested], whole.y[tested])


def _examples(x: Array, y: Array, part: str, at_least: int) -> Examples:
    examples = Examples(_features(_array(x), f"x_{part}"), _targets(_array(y), f"y_{part}"))
    n, labels = len(examples.x), len(examples.y)
    if n != labels:
        raise DataError(f"x_{part} has {n} examples and y_{part} has {labels}: expected as many.")
    if n < at_least:
        raise DataError(f"x_{part} has {n} examples: expected at least {at_least}.")
    return examples


def _features(x: NDArray[Any], name: str) -> NDArray[Any]:
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise DataError(
            f"{name} has shape {x.shape}: expected [n, ...], with at least one value for each example."
        )
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]
    if x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        raise DataError(
            f"{name} has shape {x.shape}, which looks like channels last: expected [n, channels, height, width], "
            f"as {name}.transpose(0, 3, 1, 2) gives it."
        )
    return np.ascontiguousarray(x) if x.dtype == np.uint8 and x.ndim == 4 else _real(x, name)


def _targets(y: NDArray[Any], name: str) -> NDArray[Any]:
    if y.dtype.kind not in "iub":
        if y.ndim not in (1, 2):
            raise DataError(
                f"{name} has shape {y.shape}: expected the targets of a regression as [n] or [n, d]."
            )
        return _real(y, name)
    if y.ndim != 1:
        raise DataError(
            f"{name} has shape {y.shape}: expected one class label for each example, [n]."
        )
    label_N = y.astype(np.int64)
    if (label_N < 0).any():
        raise DataError(f"{name} has the label {label_N.min()}: expected class labels 0, 1, 2, ...")
    return label_N


def _real(values: NDArray[Any], name: str) -> NDArray[Any]:
    if values.dtype.kind not in "fiub":
        raise DataError(
            f"{name} has the type {values.dtype}: expected numbers, all examples of one shape."
        )
    real = np.ascontiguousarray(
        values, dtype=np.float64 if values.dtype == np.float64 else np.float32
    )
    if not np.isfinite(real).all():
        raise DataError(
            f"{name} has a value that is not finite, the first in example {np.argwhere(~np.isfinite(real))[0][0]}: remove or replace it."
        )
    return real


def _array(values: Array) -> NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def _check_agreement(train: Examples, test: Examples) -> None:
    for name, one, other in (("x", train.x, test.x), ("y", train.y, test.y)):
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            raise DataError(
                f"{name}_train has examples of shape {one.shape[1:]} and type {one.dtype}, "
                f"{name}_test of {other.shape[1:]} and {other.dtype}: expected the same."
            )


def _count_classes(train: Examples, test: Examples) -> int:
    if train.y.dtype.kind == "f":
        return 0
    classes = int(max(train.y.max(), test.y.max())) + 1
    if classes > max(LIKELY_CLASSES, len(train.y) + len(test.y)):
        raise DataError(
            f"y has the label {classes - 1}, but there are only {len(train.y) + len(test.y)} examples: "
            "expected class labels 0, 1, 2, ...; the targets of a regression must be floating-point numbers."
        )
    return classes


def _checked(source: Source) -> Source:
    checked = from_arrays(
        source.train.x, source.train.y, source.test.x, source.test.y, name=source.name
    )
    if checked.classes > source.classes or (source.classes > 0 and checked.classes == 0):
        kind = (
            f"labels up to {checked.classes - 1}" if checked.classes else "floating-point targets"
        )
        raise DataError(
            f"The source '{source.name}' says classes = {source.classes}, but has {kind}: expected labels from 0 to classes - 1."
        )
    return replace(checked, classes=source.classes)


def from_npz(path: Path) -> Source:
    """Keys x_train, y_train, x_test, y_test, or x and y alone."""
    arrays = _npz_arrays(path)
    for keys in (("x_train", "y_train", "x_test", "y_test"), ("x_train", "y_train"), ("x", "y")):
        if arrays.keys() == set(keys):
            return from_arrays(*(arrays[key] for key in keys), name=path.stem)
    raise DataError(
        f"{path} has the arrays {', '.join(sorted(arrays)) or 'none'}: expected x_train, y_train, x_test, y_test, or x, y."
    )


def inputs(path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """Examples without targets: the array x of an .npz file."""
    arrays = _npz_arrays(path)
    if "x" not in arrays:
        raise DataError(f"{path} has the arrays {', '.join(sorted(arrays)) or 'none'}: expected x.")
    x = _features(arrays["x"], "x")
    if x.shape[1:] != shape:
        raise DataError(f"{path} has examples of shape {x.shape[1:]}: expected {tuple(shape)}.")
    return x


def _npz_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise DataError(
                    f"{path} is damaged or no .npz file: expected one as numpy.savez writes it."
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as members:
                return dict(members)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path} has an array that cannot be read ({error}); arrays of Python objects are pickles, never loaded."
        ) from error


def from_image_folder(path: Path) -> Source:
    """One subfolder per class, or such subfolders in train/ and in test/; classes are numbered in the order of their names."""
    split = {folder.name for folder in _subfolders(path)} == {"train", "test"}
    parts = [path / "train", path / "test"] if split else [path]
    for part in parts:
        if not _subfolders(part):
            raise DataError(
                f"{part} has no subfolders: expected one for each class, or train and test with such subfolders."
            )
    classes = [folder.name for folder in _subfolders(parts[0])]
    return from_arrays(
        *_load_images([_image_files(part, classes) for part in parts]), name=path.resolve().name
    )


def _subfolders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(f"{path} is no folder: expected one with a subfolder for each class.")
    return sorted(
        folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")
    )


def _image_files(part: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    labelled = []
    for folder in _subfolders(part):
        if folder.name not in classes:
            raise DataError(
                f"{folder} is a class that the training part does not have: expected one of {', '.join(classes)}."
            )
        images = sorted(
            file
            for file in folder.iterdir()
            if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
        )
        if not images:
            raise DataError(
                f"{folder} has no images: expected at least one file of {', '.join(sorted(IMAGE_SUFFIXES))}."
            )
        labelled += [(image, classes.index(folder.name)) for image in images]
    return labelled


def _load_images(parts: Sequence[Sequence[tuple[Path, int]]]) -> Iterator[NDArray[Any]]:
    """x_NCHW and y_N of each part in turn; in colour if any image of any part is."""
    paths = [path for part in parts for path, _ in part]
    sizes, modes = zip(*(formats.image_size_and_mode(path) for path in paths), strict=True)
    for path, size in zip(paths, sizes, strict=True):
        if size != sizes[0]:
            raise DataError(
                f"{path} has {size} pixels (width, height) and {paths[0]} has {sizes[0]}: expected one size for all."
            )
    grey = formats.GREY_MODES.issuperset(modes)
    for part in parts:
        yield np.stack([formats.image(path, grey) for path, _ in part])
        yield np.array([label for _, label in part])


def from_torch_dataset(train: MapStyle, test: MapStyle | None = None, name: str = "own") -> Source:
    """Every item is read once, so a random transform gives one draw of each."""
    arrays = [array for part in (train, test) if part is not None for array in _stack(part)]
    return from_arrays(*arrays, name=name)


def _stack(dataset: MapStyle) -> tuple[NDArray[Any], NDArray[Any]]:
    if not len(dataset):
        raise DataError("The dataset has no items: expected at least 2.")
    xs, ys = zip(*(_item(dataset, index) for index in range(len(dataset))), strict=True)
    for column in (xs, ys):
        for index, value in enumerate(column):
            if value.shape != column[0].shape:
                raise DataError(
                    f"Item {index} of the dataset has shape {value.shape}, item 0 has {column[0].shape}: expected the same."
                )
    return np.stack(xs), np.stack(ys)


def _item(dataset: MapStyle, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
    from PIL.Image import Image

    item = dataset[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"Item {index} of the dataset is of type {type(item).__name__}: expected a pair (x, y)."
        )
    x, y = item
    return formats.pixels(x, x.mode in formats.GREY_MODES, f"Item {index}") if isinstance(
        x, Image
    ) else _array(x), _array(y)


def from_factory(spec: str) -> Source:
    """Call "module:function" for a Source, a tuple of arrays or a map-style dataset."""
    made = _make(spec)
    if isinstance(made, str | Path):
        raise DataError(
            f"'{spec}' returned the text '{made}': expected a Source, a tuple of arrays, or a map-style dataset."
        )
    source = resolve(made)
    return source if isinstance(made, Source) else replace(source, name=spec)


def _make(spec: str) -> object:
    make = load_object("data.name", spec, DataError)
    try:
        return make()
    except Exception as error:
        raise DataError(
            f"'{spec}': the call failed with {type(error).__name__}: {error}"
        ) from error
