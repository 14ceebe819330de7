"""Custom data as objects of other libraries, by what they can do: none of them is imported.

Tables (pandas), Hugging Face datasets, map-style torch datasets, and anything with load_partition,
such as the partitioners of flwr-datasets.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspd.core.errors import DataError, nearest
from fedspd.data import formats
from fedspd.data.arrays import RawPart, Reading, as_array

TARGETS = ("label", "labels", "target", "class", "y", "fine_label")
CLIENTS = ("client", "client_id")
INPUTS = ("image", "img", "x", "features")
SPLIT = "split"  # a column of a table whose values are train and test
Parts = tuple[RawPart, RawPart | None]


def is_table(data: object) -> bool:
    """Return whether this is a table as pandas has them."""
    return hasattr(data, "iloc") and hasattr(data, "columns")


def is_hugging_face(data: object) -> bool:
    """Return whether this is a Dataset of Hugging Face."""
    return hasattr(data, "features") and hasattr(data, "column_names") and hasattr(data, "select")


def is_map_style(data: object) -> bool:
    """Return whether this is a map-style dataset in torch's sense, with items (x, y)."""
    if isinstance(data, tuple | list | dict | str | bytes | np.ndarray):
        return False
    is_array = hasattr(data, "dtype") and hasattr(data, "shape")
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not is_array


def is_dataset(data: object) -> bool:
    """Return whether this has inputs and targets of its own."""
    return is_table(data) or is_hugging_face(data) or is_map_style(data)


def dataset_parts(data: Any, reading: Reading, where: str) -> Parts:
    """Return the examples of one dataset, with its test part if it has one."""
    if is_table(data):
        return table_parts(data, reading, where)
    if is_hugging_face(data):
        return hugging_face_part(data, reading, where), None
    return torch_part(data, where), None


# --- columns ---


def _target(names: Sequence[str], reading: Reading, where: str) -> str:
    chosen = _chosen(reading.target, names, "target", where)
    found = chosen or next((name for name in TARGETS if name in names), None)
    if found is None:
        raise DataError(
            f"{where}: none of the columns {', '.join(names)} is called {' or '.join(TARGETS)}. "
            "Name the column of the targets with data.target."
        )
    return found


def _client(names: Sequence[str], reading: Reading, where: str) -> str | None:
    chosen = _chosen(reading.client, names, "client", where)
    return chosen or next((name for name in CLIENTS if name in names), None)


def _chosen(column: str | None, names: Sequence[str], key: str, where: str) -> str | None:
    if column is not None and column not in names:
        raise DataError(
            f"data.{key} = '{column}': {where} has no such column; {nearest(column, names)}"
        )
    return column


# --- tables ---


def table_parts(table: Any, reading: Reading, where: str) -> Parts:
    """Return the examples of a table; a column `split` of train and test makes two parts."""
    names = [str(name) for name in table.columns]
    table = table.set_axis(names, axis=1)
    if not len(table):
        raise DataError(f"{where}: no rows; expected one for each example.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{where}: two columns are called '{twice}'; expected each name once.")
    has_split = SPLIT in names and set(table[SPLIT].unique()) == {"train", "test"}
    others = [name for name in names if name != SPLIT or not has_split]
    target, client = _target(others, reading, where), _client(others, reading, where)
    for name in reading.inputs:
        _chosen(name, others, "inputs", where)
    _check_leak(reading, target)
    inputs = list(reading.inputs) or [name for name in others if name not in (target, client)]
    if not inputs:
        raise DataError(f"{where}: only the column '{target}'; expected columns of inputs.")

    def part(rows: Any) -> RawPart:
        own = None if client is None else _values(rows[client], client, where)
        x = _table_inputs(rows, inputs, where)
        return RawPart(x, _values(rows[target], target, where), own, has_columns=True)

    if has_split:
        return part(table[table[SPLIT] == "train"]), part(table[table[SPLIT] == "test"])
    return part(table), None


def _not_numbers(values: NDArray[Any], name: str, where: str) -> DataError:
    """Return the error about a column, with the first value that is not a number."""
    texts = [str(value) for value in values.ravel().tolist()]
    row = next((i for i, text in enumerate(texts) if not _is_number(text)), 0)
    return DataError(
        f"{where}: the column '{name}' has values such as {texts[row][:40]!r} in row {row}, "
        "counted from 0; expected numbers. Correct or encode it, or list the columns to use in "
        "data.inputs."
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_leak(reading: Reading, target: str) -> None:
    if target in reading.inputs:
        raise DataError(
            f"data.inputs: '{target}' is the column of the targets. Leave it out of the inputs."
        )


def _table_inputs(table: Any, names: Sequence[str], where: str) -> NDArray[Any]:
    if len(names) == 1 and table[names[0]].dtype == object:
        return as_array(table[names[0]], f"{where}, column '{names[0]}'")
    columns = []
    for name in names:
        values = _values(table[name], name, where)
        if values.dtype.kind not in "fiub":
            raise _not_numbers(values, name, where)
        columns.append(values)
    return np.stack(columns, axis=1)


def _values(column: Any, name: str, where: str) -> NDArray[Any]:
    """Return a column without missing values."""
    missing = column.isna().to_numpy()
    if missing.any():
        count, first = f"{missing.sum()} of {len(missing)}", int(missing.argmax())
        raise DataError(
            f"{where}: values of the column '{name}' are missing, {count}, the first in row "
            f"{first}, counted from 0. Fill them in, or leave these rows out."
        )
    values = np.asarray(column.to_numpy())
    return as_array(values.astype(str) if values.dtype == object else values, f"column '{name}'")


# --- Hugging Face ---


def hugging_face_part(dataset: Any, reading: Reading, where: str) -> RawPart:
    """Return the examples of a Dataset: its column of images or the others, and its labels."""
    names, kinds = list(dataset.column_names), _kinds(dataset)
    if not len(dataset):
        raise DataError(f"{where}: no rows; expected one for each example.")
    labelled = [name for name in names if kinds.get(name) == "ClassLabel"]
    target = reading.target or (labelled[0] if len(labelled) == 1 else None)
    target = _chosen(target, names, "target", where) or _target(names, reading, where)
    client = _client(names, reading, where)
    _check_leak(reading, target)
    inputs = _hugging_face_inputs(names, kinds, reading, {target, client}, where)
    classes = tuple(getattr(dataset.features[target], "names", None) or ())
    if len(inputs) == 1 and kinds.get(inputs[0]) == "Image":
        x = _images(dataset[inputs[0]], f"{where}, column '{inputs[0]}'")
    else:
        arrays = [_hugging_face_column(dataset, name, where) for name in inputs]
        x = arrays[0] if len(arrays) == 1 and arrays[0].ndim > 1 else np.stack(arrays, axis=1)
    own = None if client is None else as_array(list(dataset[client]), f"column '{client}'")
    y = as_array(list(dataset[target]), f"column '{target}'")
    return RawPart(x, y, own, classes, has_columns=True)


def _kinds(dataset: Any) -> dict[str, str]:
    return {name: type(kind).__name__ for name, kind in dict(dataset.features).items()}


def _hugging_face_inputs(
    names: Sequence[str],
    kinds: Mapping[str, str],
    reading: Reading,
    others: set[str | None],
    where: str,
) -> list[str]:
    for name in reading.inputs:
        _chosen(name, names, "inputs", where)
    if reading.inputs:
        return list(reading.inputs)
    images = [name for name in names if kinds.get(name) == "Image"]
    usual = [name for name in INPUTS if name in names]
    found = images[:1] or usual[:1] or [name for name in names if name not in others]
    if not found:
        raise DataError(f"{where}: no columns besides {others}; expected columns of inputs.")
    return found


def _hugging_face_column(dataset: Any, name: str, where: str) -> NDArray[Any]:
    values = as_array(list(dataset[name]), f"{where}, column '{name}'")
    if values.dtype.kind not in "fiub":
        raise _not_numbers(values, name, where)
    return values


def _images(images: Iterable[Any], where: str) -> NDArray[Any]:
    """Return PIL images as [n, channels, height, width]; in colour if any is."""
    found = list(images)
    is_grey = formats.GREY_MODES.issuperset(image.mode for image in found)
    pixels = [formats.pixels(image, is_grey, f"{where}, row {i}") for i, image in enumerate(found)]
    for i, image in enumerate(pixels):
        if image.shape != pixels[0].shape:
            raise DataError(
                f"{where}, row {i}: an image of shape {image.shape}; expected {pixels[0].shape}, "
                "as in row 0. Resize them first."
            )
    return np.stack(pixels)


# --- torch ---


def torch_part(dataset: Any, where: str) -> RawPart:
    """Return the examples of a map-style dataset; each item is read once, with its transform."""
    if not len(dataset):
        raise DataError(f"{where}: no items; expected at least 2.")
    xs, ys = zip(*(_item(dataset, i, where) for i in range(len(dataset))), strict=True)
    for values in (xs, ys):
        for index, value in enumerate(values):
            if value.shape != values[0].shape:
                raise DataError(
                    f"{where}[{index}]: shape {value.shape}; expected {values[0].shape}, as item 0."
                )
    names = getattr(dataset, "classes", None)
    is_known = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    is_class = ys[0].ndim == 0 and ys[0].dtype.kind in "iu"
    classes = tuple(names) if is_known and names and is_class else ()
    return RawPart(np.stack(xs), np.stack(ys), classes=classes)


def _item(dataset: Any, index: int, where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    from PIL.Image import Image

    item = dataset[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"{where}[{index}]: a value of type {type(item).__name__}; expected a pair (x, y)."
        )
    x, y = item
    if isinstance(x, Image):
        is_grey = x.mode in formats.GREY_MODES
        pixels = formats.pixels(x, is_grey, f"{where}[{index}]")
        return pixels, as_array(y, f"{where}[{index}], y")
    return as_array(x, f"{where}[{index}], x"), as_array(y, f"{where}[{index}], y")


# --- partitioners ---


def count_partitions(partitioner: Any) -> int:
    """Return the number of partitions of an object with load_partition."""
    count = getattr(partitioner, "num_partitions", None)
    inner = getattr(partitioner, "partitioners", None)
    if count is None and isinstance(inner, Mapping) and inner:
        count = getattr(next(iter(inner.values())), "num_partitions", None)
    if not isinstance(count, int | np.integer) or count < 1:
        raise DataError(
            f"data: {type(partitioner).__name__} has load_partition but no num_partitions; "
            "expected the number of its partitions there. Pass a list of its partitions."
        )
    return int(count)
