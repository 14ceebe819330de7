"""Custom data as a Source: arrays, .npz files, image folders, torch datasets and functions.

Images are [n, channels, height, width] uint8 from 0 to 255; [n, height, width] uint8 gets one
channel. All other inputs become [n, ...] float32, or stay float64. Integer y are class labels 0, 1,
2, ...; floating-point y are regression targets. Without a test part, a fixed fifth of the examples
becomes the test part.

Shapes: N examples, C channels, H height, W width.
"""

import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from fedspd.core.errors import DataError, nearest
from fedspd.core.imports import FROM_PYTHON, load_object
from fedspd.core.keys import Key
from fedspd.data import formats
from fedspd.data.sources import DATASETS, Examples, Source, is_official, load_dataset

Array = NDArray[Any] | torch.Tensor

CHANNELS = (1, 3, 4)
MAX_LIKELY_CLASSES = 1000  # above, and above the number of examples, labels are hardly classes
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
FUNCTION = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


class MapStyleDataset(Protocol):
    """A map-style dataset in torch's sense, with items (x, y)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def load_source(spec: object, folder: Path | None = None) -> Source:
    """Return the source that `spec` names or contains; an official dataset's name comes first."""
    if isinstance(spec, str | Path):
        return _named_source(str(spec), folder)
    if isinstance(spec, Source):
        return _checked(spec)
    if _is_arrays(spec):
        return from_arrays(*spec)
    if _is_map_style(spec):
        return from_torch_dataset(spec)
    raise DataError(
        f"data: a value of type {type(spec).__name__}; expected a name, a path, 'module:function', "
        "a Source, a tuple of 2 or 4 arrays (x_train, y_train, x_test, y_test), or a map-style "
        "dataset."
    )


def _is_arrays(spec: object) -> TypeGuard[tuple[Array, ...]]:
    if not isinstance(spec, tuple) or len(spec) not in (2, 4):
        return False
    return all(isinstance(part, np.ndarray | torch.Tensor) for part in spec)


def _is_map_style(spec: object) -> TypeGuard[MapStyleDataset]:
    if isinstance(spec, tuple | list | dict):
        return False
    return hasattr(spec, "__len__") and hasattr(spec, "__getitem__")


def _named_source(spec: str, folder: Path | None) -> Source:
    if spec.startswith(FROM_PYTHON):
        raise DataError(
            f"data.name = '{spec}': these data were passed to fedspd.run, and no file has them. "
            "Pass them again, as fedspd.run(..., data=...)."
        )
    if not spec.strip():
        raise DataError(f"data.name = '{spec}': empty; {nearest('', DATASETS)}")
    if is_official(spec):
        return load_dataset(spec, folder)
    if spec.endswith(".npz"):
        return from_npz(Path(spec))
    if Path(spec).is_dir():
        return from_image_folder(Path(spec))
    if FUNCTION.fullmatch(spec):
        return from_function(spec)
    raise DataError(
        f"data.name = '{spec}': not a dataset, an .npz file, a folder or 'module:function'; "
        f"{nearest(spec, DATASETS)}"
    )


# --- arrays ---


def from_arrays(
    x_train: Array,
    y_train: Array,
    x_test: Array | None = None,
    y_test: Array | None = None,
    *,
    name: str = "custom",
) -> Source:
    """Return a source of arrays or tensors."""
    train = _examples(x_train, y_train, "train", at_least=2)
    if x_test is None and y_test is None:
        train, test = _split(train)
    elif x_test is None or y_test is None:
        raise DataError(
            f"'{name}': only one of x_test and y_test; expected both, or neither for a split of "
            "the training part."
        )
    else:
        test = _examples(x_test, y_test, "test", at_least=1)
    _check_agreement(train, test)
    return Source(name, train, test, _count_classes(train, test))


def _split(examples: Examples) -> tuple[Examples, Examples]:
    """Return a fixed split into training and test examples.

    The names in the key decide which examples these are; another name is another split.
    """
    order = Key(0).of("own data", "test").numpy().permutation(len(examples.y))
    fifth = max(1, len(order) // 5)
    train, test = (
        Examples(examples.x[rows], examples.y[rows])
        for rows in (np.sort(order[fifth:]), np.sort(order[:fifth]))
    )
    return train, test


def _examples(x: Array, y: Array, part: str, at_least: int) -> Examples:
    examples = Examples(_inputs(_array(x), f"x_{part}"), _targets(_array(y), f"y_{part}"))
    n, targets = len(examples.x), len(examples.y)
    if n != targets:
        raise DataError(
            f"x_{part}, y_{part}: {n} examples and {targets} targets; expected as many of each."
        )
    if n < at_least:
        raise DataError(f"x_{part}: {n} examples; expected at least {at_least}.")
    return examples


def _inputs(x: NDArray[Any], name: str) -> NDArray[Any]:
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise DataError(
            f"{name}: shape {x.shape}; expected [n, ...], with at least one value per example."
        )
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]
    if x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        raise DataError(
            f"{name}: shape {x.shape} seems to have the channels last; expected [n, channels, "
            f"height, width]. Pass {name}.transpose(0, 3, 1, 2)."
        )
    is_image = x.dtype == np.uint8 and x.ndim == 4
    return np.ascontiguousarray(x) if is_image else _floats(x, name)


def _targets(y: NDArray[Any], name: str) -> NDArray[Any]:
    if y.dtype.kind not in "iub":
        if y.ndim not in (1, 2):
            raise DataError(
                f"{name}: shape {y.shape}; expected regression targets as [n] or [n, d]."
            )
        return _floats(y, name)
    if y.ndim != 1:
        raise DataError(f"{name}: shape {y.shape}; expected one class label per example, [n].")
    label_N = y.astype(np.int64)
    if (label_N < 0).any():
        raise DataError(f"{name}: the label {label_N.min()}; expected class labels 0, 1, 2, ...")
    return label_N


def _floats(values: NDArray[Any], name: str) -> NDArray[Any]:
    if values.dtype.kind not in "fiub":
        raise DataError(
            f"{name}: type {values.dtype}; expected numbers, with all examples of one shape."
        )
    dtype = np.float64 if values.dtype == np.float64 else np.float32
    floats = np.ascontiguousarray(values, dtype=dtype)
    if not np.isfinite(floats).all():
        first = np.argwhere(~np.isfinite(floats))[0][0]
        raise DataError(f"{name}: a value of example {first} is not finite. Remove or replace it.")
    return floats


def _array(values: Array) -> NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def _check_agreement(train: Examples, test: Examples) -> None:
    for name, one, other in (("x", train.x, test.x), ("y", train.y, test.y)):
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            raise DataError(
                f"{name}_test: examples of shape {other.shape[1:]} and type {other.dtype}; "
                f"expected {one.shape[1:]} and {one.dtype}, as in {name}_train."
            )


def _count_classes(train: Examples, test: Examples) -> int:
    if train.y.dtype.kind == "f":
        return 0
    classes, examples = int(max(train.y.max(), test.y.max())) + 1, len(train.y) + len(test.y)
    if classes > max(MAX_LIKELY_CLASSES, examples):
        raise DataError(
            f"y: the label {classes - 1} among only {examples} examples; expected class labels 0, "
            "1, 2, ... Pass regression targets as floating-point numbers."
        )
    return classes


def _checked(source: Source) -> Source:
    train, test = source.train, source.test
    checked = from_arrays(train.x, train.y, test.x, test.y, name=source.name)
    if checked.classes > source.classes or (source.classes > 0 and checked.classes == 0):
        found = f"labels up to {checked.classes - 1}" if checked.classes else "regression targets"
        raise DataError(
            f"'{source.name}': classes = {source.classes}, but y has {found}; expected labels from "
            "0 to classes - 1."
        )
    return replace(checked, classes=source.classes)


# --- .npz files ---


def from_npz(path: Path) -> Source:
    """Return the source of an .npz file with x_train, y_train[, x_test, y_test], or x and y."""
    arrays = _npz_arrays(path)
    for keys in (("x_train", "y_train", "x_test", "y_test"), ("x_train", "y_train"), ("x", "y")):
        if arrays.keys() == set(keys):
            return from_arrays(*(arrays[key] for key in keys), name=path.stem)
    raise DataError(
        f"'{path}': the arrays {_names(arrays)}; expected x_train, y_train, x_test, y_test, or "
        "x, y."
    )


def load_inputs(path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return examples without targets: the array x of an .npz file."""
    arrays = _npz_arrays(path)
    if "x" not in arrays:
        raise DataError(f"'{path}': the arrays {_names(arrays)}; expected x.")
    x = _inputs(arrays["x"], "x")
    if x.shape[1:] != shape:
        raise DataError(f"'{path}': examples of shape {x.shape[1:]}; expected {tuple(shape)}.")
    return x


def _names(arrays: dict[str, NDArray[Any]]) -> str:
    return ", ".join(sorted(arrays)) or "none"


def _npz_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise DataError(
                    f"'{path}': damaged or not an .npz file; expected one as numpy.savez writes it."
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as members:
                return dict(members)
    except OSError as error:
        raise DataError(f"'{path}': cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"'{path}': an array cannot be read ({error}); expected arrays of numbers. Arrays of "
            "Python objects are pickles, which are never loaded."
        ) from error


# --- image folders ---


def from_image_folder(path: Path) -> Source:
    """Return the source of a folder with one subfolder per class, or with such train/ and test/.

    Classes are numbered in the order of their names.
    """
    is_split = {folder.name for folder in _subfolders(path)} == {"train", "test"}
    parts = [path / "train", path / "test"] if is_split else [path]
    for part in parts:
        if not _subfolders(part):
            raise DataError(
                f"'{part}': no subfolders; expected one for each class, or train and test with "
                "such subfolders."
            )
    classes = [folder.name for folder in _subfolders(parts[0])]
    files = [_image_files(part, classes) for part in parts]
    return from_arrays(*_read_images(files), name=path.resolve().name)


def _subfolders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(f"'{path}': not a folder; expected one with a subfolder for each class.")
    folders = (folder for folder in path.iterdir() if folder.is_dir())
    return sorted(folder for folder in folders if not folder.name.startswith("."))


def _image_files(part: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Return the images of a part with their labels."""
    labelled = []
    for folder in _subfolders(part):
        if folder.name not in classes:
            raise DataError(
                f"'{folder}': a class that the training part does not have; expected one of "
                f"{', '.join(classes)}."
            )
        images = sorted(file for file in folder.iterdir() if _is_image(file))
        if not images:
            raise DataError(
                f"'{folder}': no images; expected at least one file of "
                f"{', '.join(sorted(IMAGE_SUFFIXES))}."
            )
        labelled += [(image, classes.index(folder.name)) for image in images]
    return labelled


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")


def _read_images(parts: Sequence[Sequence[tuple[Path, int]]]) -> Iterator[NDArray[Any]]:
    """Yield x_NCHW and y_N of each part in turn; in colour if any image of any part is."""
    paths = [path for part in parts for path, _ in part]
    sizes, modes = zip(*(formats.image_size_and_mode(path) for path in paths), strict=True)
    for path, size in zip(paths, sizes, strict=True):
        if size != sizes[0]:
            raise DataError(
                f"'{path}': {_pixels(size)}; expected {_pixels(sizes[0])}, as '{paths[0]}' has."
            )
    is_grey = formats.GREY_MODES.issuperset(modes)
    for part in parts:
        yield np.stack([formats.read_image(path, is_grey) for path, _ in part])
        yield np.array([label for _, label in part])


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]} pixels"


# --- torch datasets and functions ---


def from_torch_dataset(
    train: MapStyleDataset, test: MapStyleDataset | None = None, name: str = "custom"
) -> Source:
    """Return the source of torch datasets; each item is read once, so transforms are drawn once."""
    arrays = [array for part in (train, test) if part is not None for array in _stack(part)]
    return from_arrays(*arrays, name=name)


def _stack(dataset: MapStyleDataset) -> tuple[NDArray[Any], NDArray[Any]]:
    if not len(dataset):
        raise DataError("dataset: no items; expected at least 2.")
    xs, ys = zip(*(_item(dataset, index) for index in range(len(dataset))), strict=True)
    for values in (xs, ys):
        for index, value in enumerate(values):
            if value.shape != values[0].shape:
                raise DataError(
                    f"dataset[{index}]: shape {value.shape}; expected {values[0].shape}, as item 0."
                )
    return np.stack(xs), np.stack(ys)


def _item(dataset: MapStyleDataset, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
    from PIL.Image import Image

    item = dataset[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"dataset[{index}]: a value of type {type(item).__name__}; expected a pair (x, y)."
        )
    x, y = item
    if isinstance(x, Image):
        is_grey = x.mode in formats.GREY_MODES
        return formats.pixels(x, is_grey, f"dataset[{index}]"), _array(y)
    return _array(x), _array(y)


def from_function(spec: str) -> Source:
    """Call "module:function" for a Source, a tuple of arrays or a map-style dataset."""
    data = _call(spec)
    if isinstance(data, str | Path):
        raise DataError(
            f"data.name = '{spec}': the call returned '{data}'; expected a Source, a tuple of "
            "arrays, or a map-style dataset."
        )
    source = load_source(data)
    return source if isinstance(data, Source) else replace(source, name=spec)


def _call(spec: str) -> object:
    function = load_object("data.name", spec, DataError)
    try:
        return function()
    except Exception as error:
        raise DataError(
            f"data.name = '{spec}': the call failed with {type(error).__name__}: {error}"
        ) from error
