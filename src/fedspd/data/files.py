"""Custom data from files: .npz, CSV, Parquet, image folders, and a file or folder per client."""

import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspd.core.errors import DataError, MissingExtraError
from fedspd.data import formats
from fedspd.data.arrays import RawPart, Reading, as_inputs, from_clients, from_parts
from fedspd.data.objects import Parts, table_parts
from fedspd.data.sources import Source

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
FILE_SUFFIXES = (".npz", ".csv", ".parquet")


def from_file(path: Path, reading: Reading) -> Source:
    """Return the source of an .npz, CSV or Parquet file."""
    return from_parts(*_file_parts(path, reading), path.stem, reading)


def _file_parts(path: Path, reading: Reading) -> Parts:
    if path.suffix.lower() == ".npz":
        return _npz_parts(path)
    return table_parts(_read_table(path), reading, str(path))


def _read_table(path: Path) -> Any:
    try:
        import pandas
    except ImportError:
        raise MissingExtraError.of("A CSV or Parquet file", "tables") from None
    is_csv = path.suffix.lower() == ".csv"
    try:
        table = pandas.read_csv(path) if is_csv else pandas.read_parquet(path)
    except OSError as error:
        raise DataError(f"'{path}': cannot be read: {error.strerror or error}.") from error
    except ImportError:
        raise MissingExtraError.of("A Parquet file", "tables") from None
    except Exception as error:  # pandas and pyarrow have many
        raise _unreadable(path, error, "CSV" if is_csv else "Parquet") from error
    if is_csv and len(table.columns) == 1:
        raise DataError(
            f"'{path}': one column only, '{str(table.columns[0])[:40]}'; expected columns that are "
            "separated by commas, named in the first line."
        )
    is_indexed = is_csv and table.columns[0] == "Unnamed: 0"  # pandas wrote its index
    return table.iloc[:, 1:] if is_indexed else table


def _unreadable(path: Path, error: Exception, kind: str) -> DataError:
    """Return what is wrong with a table that pandas does not read."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if type(error).__name__ == "EmptyDataError":
        problem = "the file is empty; expected a line of column names, then one for each example"
    elif ragged := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", reason):
        columns, line, found = ragged.groups()
        problem = f"line {line} has {found} values; expected {columns}, as the lines above have"
    elif isinstance(error, UnicodeDecodeError):
        problem = "not text in UTF-8. Save it with this encoding"
    else:
        problem = f"not a {kind} file: {reason.rstrip('.')}"
    return DataError(f"'{path}': {problem}.")


# --- .npz files ---


def _npz_parts(path: Path) -> Parts:
    """Return the arrays x_train, y_train[, x_test, y_test], or x and y, with their clients."""
    arrays = _npz_arrays(path)
    whole = {"x", "y"}, {"x", "y", "client"}
    train = {"x_train", "y_train"}, {"x_train", "y_train", "client_train"}
    both = [names | {name.replace("train", "test") for name in names} for names in train]
    if arrays.keys() in whole:
        return RawPart(arrays["x"], arrays["y"], arrays.get("client")), None
    if arrays.keys() in (*train, *both):
        parts = [
            RawPart(arrays[f"x_{part}"], arrays[f"y_{part}"], arrays.get(f"client_{part}"))
            for part in ("train", "test")
            if f"x_{part}" in arrays
        ]
        return parts[0], parts[1] if len(parts) > 1 else None
    raise DataError(
        f"'{path}': the arrays {_names(arrays)}; expected x_train, y_train, x_test, y_test, or "
        "x, y; with clients also client_train and client_test, or client."
    )


def load_inputs(path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return examples without targets: the array x of an .npz file."""
    arrays = _npz_arrays(path)
    if "x" not in arrays:
        raise DataError(f"'{path}': the arrays {_names(arrays)}; expected x.")
    x = as_inputs(arrays["x"], f"'{path}': x")
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


# --- folders ---


def from_folder(path: Path, reading: Reading) -> Source:
    """Return the source of a folder: of images by class, or with a file or a folder per client."""
    name, folders = path.resolve().name, _subfolders(path)
    files = {file.stem: file for file in _data_files(path)}
    if files and not folders:
        _check_clients(
            path,
            list(files),
            "Make one file of the parts, with a column split for a "
            "table, or with arrays x_train, y_train, x_test and y_test.",
        )
        clients = {key: _file_parts(file, reading) for key, file in files.items()}
        return from_clients(clients, name, reading)
    held = {folder.name: _data_files(folder) for folder in folders}
    if folders and all(len(own) == 1 for own in held.values()):
        _check_clients(path, list(held), "Make one file of the parts.")
        clients = {key: _file_parts(own[0], reading) for key, own in held.items()}
        return from_clients(clients, name, reading)
    if folders and not _is_split(path) and all(_subfolders(folder) for folder in folders):
        _check_clients(path, list(held), "Call the two parts train and test.")
        return _from_image_clients(folders, name, reading)
    return _from_images(path, name, reading)


def _check_clients(path: Path, names: Sequence[str], fix: str) -> None:
    """Refuse a training part as a client of this name, which the others would be compared with."""
    if "train" in names:
        raise DataError(
            f"'{path}': {', '.join(names)} would be names of clients, and train is the name of a "
            f"part; expected one for each client. {fix}"
        )


def _data_files(path: Path) -> list[Path]:
    found = (file for file in path.iterdir() if file.suffix.lower() in FILE_SUFFIXES)
    return sorted(file for file in found if file.is_file() and not file.name.startswith("."))


def _is_split(path: Path) -> bool:
    return {folder.name for folder in _subfolders(path)} == {"train", "test"}


def _from_images(path: Path, name: str, reading: Reading) -> Source:
    """Return the source of a folder with one subfolder per class, or with such train/ and test/.

    Classes are numbered in the order of their names.
    """
    parts = _image_parts(path)
    classes = [folder.name for folder in _subfolders(parts[0])]
    read = list(_read_images([_image_files(part, classes) for part in parts]))
    if reading.is_numbered:
        number_K = _class_numbers(path, classes)
        made = [RawPart(x, number_K[y]) for x, y in read]
    else:
        made = [RawPart(x, y, classes=tuple(classes)) for x, y in read]
    return from_parts(made[0], made[1] if len(made) > 1 else None, name, reading)


def _class_numbers(path: Path, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the numbers that folders are named by; a class may have no folder."""
    for name in names:
        if not name.isdecimal():
            raise DataError(
                f"'{path}': the folder '{name}'; expected the numbers of the network's classes. "
                "Rename it."
            )
    return np.array([int(name) for name in names], np.int64)


def _from_image_clients(folders: Sequence[Path], name: str, reading: Reading) -> Source:
    """Return the source of a folder per client, each with a subfolder per class."""
    parts = {folder.name: _image_parts(folder) for folder in folders}
    found = {label.name for own in parts.values() for part in own for label in _subfolders(part)}
    classes = sorted(found)
    files = [_image_files(part, classes) for own in parts.values() for part in own]
    read = iter([RawPart(x, y, classes=tuple(classes)) for x, y in _read_images(files)])
    clients = {
        key: (next(read), next(read) if len(own) > 1 else None) for key, own in parts.items()
    }
    return from_clients(clients, name, reading)


def _image_parts(path: Path) -> list[Path]:
    parts = [path / "train", path / "test"] if _is_split(path) else [path]
    for part in parts:
        if not _subfolders(part):
            raise DataError(
                f"'{part}': no subfolders; expected one for each class, train and test with "
                "such subfolders, or a file or a folder for each client."
            )
    return parts


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


def _read_images(
    parts: Sequence[Sequence[tuple[Path, int]]],
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
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
        images = np.stack([formats.read_image(path, is_grey) for path, _ in part])
        yield images, np.array([label for _, label in part])


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]} pixels"
