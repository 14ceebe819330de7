"""Custom data of every form as a Source: files, folders, functions and objects.

Data with clients of their own stay with these; all others are partitioned among the clients.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspd.core.errors import DataError, nearest
from fedspd.core.imports import FROM_PYTHON, load_object
from fedspd.data.arrays import RawPart, Reading, from_clients, from_parts
from fedspd.data.files import FILE_SUFFIXES, from_file, from_folder, load_inputs
from fedspd.data.objects import count_partitions, dataset_parts, is_dataset, is_table
from fedspd.data.sources import DATASETS, Source, is_official, load_dataset

__all__ = ["Reading", "load_inputs", "load_source"]

FUNCTION = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
FORMS = (
    "a name, a path, 'module:function', a tuple (x, y) or (x_train, y_train, x_test, y_test), a "
    "dataset or a pair of them, a table, or a list or dict of these for each client"
)


def load_source(
    spec: object,
    folder: Path | None = None,
    reading: Reading | None = None,
    key: str = "data.name",
) -> Source:
    """Return the source that `spec` names or contains; an official dataset's name comes first.

    Errors name the key and a spec that is text, so that a person finds the file.
    """
    reading = reading or Reading()
    try:
        source = _read(spec, folder, reading)
    except DataError as error:
        if not isinstance(spec, str | Path):
            raise
        raise DataError(_name_spec(str(error), str(spec), key)) from error
    except OSError as error:  # of a folder that this user may not read
        raise DataError(
            f"{key} = '{spec}': '{error.filename}' cannot be read: {error.strerror or error}."
        ) from error
    for key in ("inputs", "target", "client"):
        if (value := getattr(reading, key)) and not source.has_columns:
            shown = f"'{value}'" if isinstance(value, str) else ", ".join(value)
            raise DataError(
                f"data.{key} = {shown}: '{source.name}' has no columns; expected a table or a "
                "Hugging Face dataset. Leave it out."
            )
    return source


def _name_spec(sentence: str, spec: str, key: str) -> str:
    """Return the sentence of an error with the key and its value, unless it names a part of it."""
    for start in (f"data.name = '{spec}': ", f"'{spec}': ", f"{spec}: "):
        if sentence.startswith(start):
            return f"{key} = '{spec}': {sentence.removeprefix(start)}"
    return sentence if spec in sentence else f"{key} = '{spec}': {sentence}"


def _read(spec: object, folder: Path | None, reading: Reading) -> Source:
    if isinstance(spec, str | Path):
        return _named_source(str(spec), folder, reading)
    if isinstance(spec, Source):
        return _checked(spec)
    if hasattr(spec, "load_partition"):
        return _from_partitioner(spec, reading)
    if isinstance(spec, list) or (isinstance(spec, Mapping) and not _is_split(spec)):
        return _from_clients(spec, reading)
    return from_parts(*_parts(spec, reading, "data"), reading=reading)


def _named_source(spec: str, folder: Path | None, reading: Reading) -> Source:
    if spec.startswith(FROM_PYTHON):
        raise DataError(
            f"data.name = '{spec}': these data were passed to fedspd.run, and no file has them. "
            "Pass them again, as fedspd.run(..., data=...)."
        )
    if not spec.strip():
        raise DataError(f"data.name = '{spec}': empty; {nearest('', DATASETS)}")
    if is_official(spec):
        return load_dataset(spec, folder)
    if spec.lower().endswith(FILE_SUFFIXES):
        return from_file(Path(spec), reading)
    if Path(spec).is_dir():
        return from_folder(Path(spec), reading)
    if FUNCTION.fullmatch(spec):
        return _from_function(spec, reading)
    if Path(spec).is_file():
        raise DataError(
            f"data.name = '{spec}': not a format that is read; expected a file that ends in "
            f"{', '.join(FILE_SUFFIXES)}. Convert it, or pass the data as arrays."
        )
    raise DataError(
        f"data.name = '{spec}': not a dataset, a file ({', '.join(FILE_SUFFIXES)}), a folder or "
        f"'module:function'; {nearest(spec, DATASETS)}"
    )


# --- objects ---


def _parts(spec: Any, reading: Reading, where: str) -> tuple[RawPart, RawPart | None]:
    """Return the training part and, if there is one, the test part of an object."""
    if isinstance(spec, Mapping) and _is_split(spec):
        pair = [spec["train"], *(spec[key] for key in ("test", "validation") if key in spec)][:2]
        return _pair(pair, reading, where)
    if isinstance(spec, tuple) and len(spec) == 2 and _are_datasets(spec):
        return _pair(spec, reading, where)
    if isinstance(spec, tuple) and len(spec) == 2 and all(map(_is_pair_of_arrays, spec)):
        return RawPart(*spec[0]), RawPart(*spec[1])
    if isinstance(spec, tuple) and len(spec) in (2, 4) and all(map(_is_array_like, spec)):
        return RawPart(*spec[:2]), RawPart(*spec[2:]) if len(spec) == 4 else None
    if is_dataset(spec):
        return dataset_parts(spec, reading, where)
    kind = type(spec).__name__
    if isinstance(spec, tuple):
        kind += f" ({', '.join(type(each).__name__ for each in spec)})"
    raise DataError(f"{where}: a value of type {kind}; expected {FORMS}.")


def _pair(pair: Sequence[Any], reading: Reading, where: str) -> tuple[RawPart, RawPart | None]:
    parts = [_parts(each, reading, where)[0] for each in pair]
    return parts[0], parts[1] if len(parts) > 1 else None


def _is_split(spec: Mapping[Any, Any]) -> bool:
    """Return whether a mapping has a training part, as a DatasetDict has."""
    return "train" in spec and set(spec) <= {"train", "test", "validation", "unsupervised"}


def _are_datasets(spec: tuple[Any, ...]) -> bool:
    """Return whether these are two datasets: of two tables, the second has targets too."""
    if all(map(is_table, spec)):
        return list(spec[0].columns) == list(spec[1].columns)
    return all(is_dataset(each) and not _is_array_like(each) for each in spec)


def _is_pair_of_arrays(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_array_like, value))


def _is_array_like(value: object) -> bool:
    is_known = isinstance(value, np.ndarray | torch.Tensor | list | tuple)
    return is_known or hasattr(value, "toarray") or hasattr(value, "to_numpy")


def _from_clients(spec: Any, reading: Reading) -> Source:
    named = spec if isinstance(spec, Mapping) else dict(enumerate(spec))
    clients = {str(name): _parts(own, reading, f"data[{name!r}]") for name, own in named.items()}
    return from_clients(clients, reading=reading)


def _from_partitioner(spec: Any, reading: Reading) -> Source:
    count = count_partitions(spec)
    clients = {}
    for i in range(count):
        where = f"load_partition({i})"
        try:
            own = spec.load_partition(i)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"data: {where} failed with {type(error).__name__}: {reason}"
            ) from error
        clients[str(i)] = _parts(own, reading, where)
    return from_clients(clients, type(spec).__name__, reading)


# --- sources and functions ---


def _checked(source: Source) -> Source:
    train, test = source.train, source.test
    if source.classes == 0 and train.y.dtype.kind != "f":
        raise DataError(
            f"'{source.name}': classes = 0, but y has labels; expected regression targets as "
            "floating-point numbers."
        )
    classes = tuple(map(str, range(source.classes)))
    parts = [RawPart(each.x, each.y, classes=classes) for each in (train, test)]
    reading = Reading(task="auto" if classes else "regression")
    checked = from_parts(parts[0], parts[1], source.name, reading)
    return replace(source, train=checked.train, test=checked.test)


def _from_function(spec: str, reading: Reading) -> Source:
    """Call "module:function" for a Source, or anything else that has data."""
    data = _call(spec)
    if isinstance(data, str | Path):
        raise DataError(
            f"data.name = '{spec}': the call returned '{data}'; expected a Source, a tuple of "
            "arrays, or a map-style dataset."
        )
    source = load_source(data, reading=reading)
    return source if isinstance(data, Source) else replace(source, name=spec)


def _call(spec: str) -> object:
    function = load_object("data.name", spec, DataError)
    try:
        return function()
    except Exception as error:
        raise DataError(
            f"data.name = '{spec}': the call failed with {type(error).__name__}: {error}"
        ) from error
