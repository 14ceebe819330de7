"""Arrays as a Source: the one form that custom data of any kind become.

Images are [n, channels, height, width] uint8 from 0 to 255; [n, height, width] uint8 gets one
channel. All other inputs become [n, ...] float32, or stay float64. Without a test part, a fixed
fifth of the examples becomes the test part; with clients, a fifth of each client's examples.

Shapes: N examples.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedspd.core.errors import DataError
from fedspd.core.keys import Key
from fedspd.data.labels import Task, find_targets
from fedspd.data.sources import Examples, Owners, Source

CHANNELS = (1, 3, 4)
MAX_DENSE_BYTES = 4 << 30  # of a sparse matrix
MIN_TRAIN, MIN_TEST = 2, 1  # examples of a client
BRIGHT = 250  # the brightest pixel of many images is at least this bright
FEW = 1000  # examples to look at


@dataclass(frozen=True)
class RawPart:
    """Training or test examples as they were given.

    x        array-like, with one row per example
    y        array-like, with one target per example
    client   the client of each example, if the data have clients of their own
    classes  the names of the classes, if y is known to be their numbers
    has_columns  whether x and y were columns with names
    """

    x: Any
    y: Any
    client: Any = None
    classes: tuple[str, ...] = ()
    has_columns: bool = False


@dataclass(frozen=True)
class Reading:
    """How to read data: which columns a table has, and what its targets are.

    is_numbered  labels are the numbers of classes already, as on a device of a network
    splits_alone  without a test part, the part of an example follows from it alone, as on a device
                  whose examples are private: a permutation of all of them changes with their number
    """

    inputs: tuple[str, ...] = ()
    target: str | None = None
    client: str | None = None
    task: Task = "auto"
    is_numbered: bool = False
    splits_alone: bool = False


@dataclass
class _Columns:
    """The parts of several clients, one after another."""

    x: list[NDArray[Any]] = field(default_factory=list)
    y: list[NDArray[Any]] = field(default_factory=list)
    client: list[str] = field(default_factory=list)


def from_parts(
    train: RawPart,
    test: RawPart | None = None,
    name: str = "custom",
    reading: Reading | None = None,
) -> Source:
    """Return the source of a training part and, if there is one, a test part."""
    reading = reading or Reading()
    parts = {"train": train} if test is None else {"train": train, "test": test}
    x = {key: as_inputs(part.x, f"x_{key}") for key, part in parts.items()}
    y = {key: as_array(part.y, f"y_{key}") for key, part in parts.items()}
    for key in parts:
        _check_lengths(x[key], y[key], key)
    known = train.classes or (_numbered(list(y.values())) if reading.is_numbered else ())
    targets, classes, notes = find_targets(list(y.values()), reading.task, known)
    examples = [
        Examples(inputs, own if classes else as_floats(own, f"y_{key}"))
        for (key, inputs), own in zip(x.items(), targets, strict=True)
    ]
    owners = _find_owners(parts, [len(each.y) for each in examples])
    first, rest, owners = _with_test(examples, owners, reading.splits_alone)
    _check_agreement(first, rest)
    names = classes if classes != tuple(map(str, range(len(classes)))) else ()
    about = (*notes, *_note_pixels(first.x)), train.has_columns
    return Source(name, first, rest, len(classes), names, owners, *about)


def _numbered(parts: Sequence[NDArray[Any]]) -> tuple[str, ...]:
    """Return the names 0, 1, 2, ... of classes, up to the largest label."""
    if any(y.dtype.kind in "USO" for y in parts):
        raise DataError("y: labels are strings; expected the numbers of the network's classes.")
    if any(y.dtype.kind == "f" for y in parts):
        return ()
    return tuple(map(str, range(int(max(y.max(initial=0) for y in parts)) + 1)))


def from_clients(
    clients: Mapping[str, tuple[RawPart, RawPart | None]],
    name: str = "custom",
    reading: Reading | None = None,
) -> Source:
    """Return the source of the examples of each client: a training part, and a test part or none.

    Either all clients have a test part, or none has.
    """
    if not clients:
        raise DataError(f"'{name}': no clients; expected at least one.")
    without = [client for client, (_, test) in clients.items() if test is None]
    if without and len(without) < len(clients):
        raise DataError(
            f"'{name}': client '{without[0]}' has no test part, and others have; expected a test "
            "part of every client, or of none."
        )
    train, test = _Columns(), _Columns()
    for client, parts in clients.items():
        for columns, part in zip((train, test), parts, strict=True):
            if part is not None:
                _append(columns, part, client)
    classes = next((part.classes for part, _ in clients.values() if part.classes), ())
    about = classes, any(part.has_columns for part, _ in clients.values())
    joined = [
        RawPart(_joined(each.x, "x"), _joined(each.y, "y"), np.array(each.client), *about)
        for each in (train, test)
        if each.client
    ]
    source = from_parts(joined[0], joined[1] if len(joined) > 1 else None, name, reading)
    return _in_given_order(source, list(clients))


def _append(columns: _Columns, part: RawPart, client: str) -> None:
    x, y = as_array(part.x, f"client '{client}', x"), as_array(part.y, f"client '{client}', y")
    if len(x) != len(y):
        raise DataError(
            f"client '{client}': {len(x)} examples and {len(y)} targets; expected as many of each."
        )
    if not len(y):
        raise DataError(f"client '{client}': no examples. Give it some, or leave it out.")
    columns.x.append(x)
    columns.y.append(y)
    columns.client += [client] * len(y)


def _joined(arrays: Sequence[NDArray[Any]], name: str) -> NDArray[Any]:
    for array in arrays:
        if array.shape[1:] != arrays[0].shape[1:]:
            raise DataError(
                f"{name}: the clients have examples of shape {arrays[0].shape[1:]} and "
                f"{array.shape[1:]}; expected one shape."
            )
    return np.concatenate(arrays)


def _in_given_order(source: Source, names: Sequence[str]) -> Source:
    """Return the source with its clients in this order instead of the alphabet's."""
    assert source.owners is not None
    place = np.array([names.index(name) for name in source.owners.names])
    owners = Owners(tuple(names), place[source.owners.train], place[source.owners.test])
    return replace(source, owners=owners)


# --- values ---


def as_array(values: Any, name: str) -> NDArray[Any]:
    """Return an array of numbers or strings."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return np.asarray((values.float() if values.dtype == torch.bfloat16 else values).numpy())
    if hasattr(values, "toarray"):
        return _dense(values, name)
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise DataError(f"{name}: rows of several lengths; expected one shape.") from None
    if array.dtype == object and len(array):
        array = _unpacked(array, name)
    return array


def _unpacked(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Return objects as strings or numbers, where they are such."""
    values = array.ravel().tolist()
    if all(isinstance(value, str) for value in values):
        return array.astype(str)
    try:
        return np.stack([np.asarray(value, dtype=np.float64) for value in array])
    except (ValueError, TypeError, OverflowError):
        wrong = next((v for v in values if not isinstance(v, int | float) or v != v), values[0])
        kinds = {type(value).__name__ for value in values} - {"str"}
        others = f" among those of type {min(kinds)}" if isinstance(wrong, str) else ""
        raise DataError(
            f"{name}: a value {str(wrong)[:40]!r} of type {type(wrong).__name__}{others}; expected "
            "numbers or strings, none missing."
        ) from None


def _dense(matrix: Any, name: str) -> NDArray[Any]:
    size = int(np.prod(matrix.shape)) * 4
    if size > MAX_DENSE_BYTES:
        raise DataError(
            f"{name}: {matrix.shape[0]} x {matrix.shape[1]} numbers take {size / 1e9:,.0f} GB once "
            "they are dense; expected less than 4 GB. Keep fewer columns."
        )
    dtype = np.float64 if matrix.dtype == np.float64 else np.float32
    return np.asarray(matrix.astype(dtype).toarray())


def as_inputs(values: Any, name: str) -> NDArray[Any]:
    """Return inputs as images or floating-point numbers."""
    x = as_array(values, name)
    if x.dtype.kind in "US":
        raise DataError(
            f"{name}: strings, such as {str(x.ravel()[0])[:40]!r}; expected numbers. Encode text "
            "first, for example with scikit-learn's CountVectorizer."
        )
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
    return np.ascontiguousarray(x) if is_image else as_floats(x, name)


def as_floats(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Return finite numbers as float32, or float64 if they are."""
    if values.ndim > 2 and name.startswith("y"):
        raise DataError(
            f"{name}: shape {values.shape}; expected regression targets as [n] or [n, d]."
        )
    if values.dtype.kind not in "fiub":
        raise DataError(
            f"{name}: type {values.dtype}; expected numbers, with all examples of one shape."
        )
    dtype = np.float64 if values.dtype == np.float64 else np.float32
    floats = np.ascontiguousarray(values, dtype=dtype)
    if not np.isfinite(floats).all():
        first = np.argwhere(~np.isfinite(floats))[0]
        column = f", in column {first[1]}," if floats.ndim == 2 else ""
        raise DataError(
            f"{name}: a value of example {first[0]}{column} is not finite. Remove or replace it."
        )
    return floats


def _note_pixels(x: NDArray[Any]) -> list[str]:
    """Return a note about inputs that seem to be pixels and are not of an image's type."""
    if x.dtype == np.uint8 or x.min() < 0 or not BRIGHT <= x.max() <= 255:
        return []
    if (x[:FEW] % 1).any():
        return []
    return [
        f"x: whole numbers from {x.min():g} to {x.max():g} are used as they are. If they are "
        "pixels, divide them by 255, or pass images as uint8 of shape [n, channels, height, width]."
    ]


def _check_lengths(x: NDArray[Any], y: NDArray[Any], part: str) -> None:
    n, targets, at_least = len(x), len(y) if y.ndim else 0, 2 if part == "train" else 1
    if n != targets:
        raise DataError(
            f"x_{part}, y_{part}: {n} examples and {targets} targets; expected as many of each."
        )
    if n < at_least:
        raise DataError(f"x_{part}: {n} examples; expected at least {at_least}.")


def _check_agreement(train: Examples, test: Examples) -> None:
    for name, one, other in (("x", train.x, test.x), ("y", train.y, test.y)):
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            raise DataError(
                f"{name}_test: examples of shape {other.shape[1:]} and type {other.dtype}; "
                f"expected {one.shape[1:]} and {one.dtype}, as in {name}_train."
            )


# --- clients and test parts ---


def _find_owners(parts: Mapping[str, RawPart], sizes: Sequence[int]) -> Owners | None:
    """Return whose examples these are, or None if the data have no clients."""
    given = {key: part.client for key, part in parts.items() if part.client is not None}
    if not given:
        return None
    if len(given) < len(parts):
        raise DataError(
            f"client: only the {next(iter(given))} part has clients; expected both parts to have "
            "them, or no test part."
        )
    ids = {key: as_array(client, f"client_{key}").ravel() for key, client in given.items()}
    for (key, own), size in zip(ids.items(), sizes, strict=True):
        if len(own) != size:
            raise DataError(
                f"client_{key}: {len(own)} clients for {size} examples; expected one for each."
            )
        if own.dtype.kind == "f" and not np.isfinite(own).all():
            raise DataError(f"client_{key}: a client is missing; expected one for each example.")
    values = np.unique(ids["train"])
    if "test" in ids and len(unknown := np.setdiff1d(ids["test"], values)):
        raise DataError(
            f"client_test: the client '{unknown[0]}' has no training examples. Remove it."
        )
    numbers = [np.searchsorted(values, own).astype(np.int64) for own in ids.values()]
    names = tuple(str(int(v) if isinstance(v, float) else v) for v in values.tolist())
    test = numbers[1] if len(numbers) > 1 else np.empty(0, np.int64)
    return Owners(names, numbers[0], test)


def _with_test(
    examples: Sequence[Examples], owners: Owners | None, splits_alone: bool
) -> tuple[Examples, Examples, Owners | None]:
    """Return training and test examples; without a test part, a fixed split."""
    train = examples[0]
    if len(examples) > 1:
        _check_amounts(owners)
        return train, examples[1], owners
    rows = _split_each(train) if splits_alone else _split_rows(len(train.y), owners)
    rows_train, rows_test = rows
    first, rest = (Examples(train.x[rows], train.y[rows]) for rows in (rows_train, rows_test))
    if owners is not None:
        owners = Owners(owners.names, owners.train[rows_train], owners.train[rows_test])
        _check_amounts(owners)
    return first, rest, owners


def _split_rows(count: int, owners: Owners | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows of a fixed split; the names in the keys decide which rows these are."""
    key, rows = Key(0).of("own data", "test"), [np.arange(count)]
    if owners is not None:
        rows = [np.flatnonzero(owners.train == client) for client in range(len(owners.names))]
    orders = [
        own[(key if owners is None else key.of(client)).numpy().permutation(len(own))]
        for client, own in enumerate(rows)
    ]
    fifths = [max(1, len(order) // 5) for order in orders]
    pairs = list(zip(orders, fifths, strict=True))
    train = np.concatenate([order[fifth:] for order, fifth in pairs])
    return np.sort(train), np.sort(np.concatenate([order[:fifth] for order, fifth in pairs]))


def _split_each(examples: Examples) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows of a split by a hash of each example."""
    pairs = zip(examples.x, examples.y, strict=True)
    hashes = [hashlib.sha256(x.tobytes() + y.tobytes()).digest() for x, y in pairs]
    is_test_N = np.array([int.from_bytes(each[:8], "little") % 5 == 0 for each in hashes])
    train, test = np.flatnonzero(~is_test_N), np.flatnonzero(is_test_N)
    if len(train) < MIN_TRAIN or len(test) < MIN_TEST:
        raise DataError(
            f"x, y: all {len(is_test_N)} examples fell into one part, or all but one; expected "
            f"{MIN_TRAIN} to train and {MIN_TEST} to test. Give a test part, or more examples."
        )
    return train, test


def _check_amounts(owners: Owners | None) -> None:
    """Refuse a client with too few examples to train or to test."""
    if owners is None:
        return
    parts = (("training", owners.train, MIN_TRAIN), ("test", owners.test, MIN_TEST))
    for part, client_N, least in parts:
        count_C = np.bincount(client_N, minlength=len(owners.names))
        if count_C.min() < least:
            name = owners.names[int(count_C.argmin())]
            raise DataError(
                f"client '{name}': {count_C.min()} {part} examples; expected at least {MIN_TRAIN} "
                f"to train and {MIN_TEST} to test. Give it more, or leave it out."
            )
