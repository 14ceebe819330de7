"""Targets as class labels 0, 1, 2, ... with the names that they had, or as regression targets.

Integers, booleans, strings and categories are classes, in the order of their values. Floating-point
numbers are regression targets, unless they are few integers. A guess that can be wrong is noted.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedspd.core.errors import DataError

Task = Literal["auto", "classes", "regression"]
LIKELY_CLASSES = 20  # up to this many different integers, given as floats, are read as classes
MIN_PER_CLASS = 2  # examples on average; with fewer, labels are hardly classes
MAX_SHOWN = 5


def find_targets(
    parts: Sequence[NDArray[Any]], task: Task, names: Sequence[str] = ()
) -> tuple[list[NDArray[Any]], tuple[str, ...], list[str]]:
    """Return the targets of all parts, the names of their classes and notes about guesses.

    No names mean a regression. `names` are those of classes that are known already: the targets
    are then integers from 0.
    """
    parts = [_flat(y) for y in parts]
    if names:
        return [_known(y, names) for y in parts], tuple(names), []
    everything = np.concatenate([y.ravel() for y in parts])
    if task == "regression":
        return [_numbers(y) for y in parts], (), []
    if all(map(_is_one_hot, parts)):
        classes = parts[0].shape[1]
        found = [y.argmax(1).astype(np.int64) for y in parts]
        return found, _numbered(classes), [f"y: {classes} columns of 0 and 1 were read as classes."]
    is_float = everything.dtype.kind == "f"
    if is_float and task == "auto" and not _are_few_integers(parts, everything):
        return list(parts), (), []
    if any(y.ndim != 1 for y in parts):
        raise DataError(
            f"y: shape {parts[0].shape}; expected one class label per example, [n], columns of 0 "
            "and 1 with one 1 in each row, or regression targets as floating-point numbers."
        )
    found, values = _coded(parts, everything)
    notes = [_note_floats(values)] if is_float and task == "auto" else []
    if len(values) == 1:
        notes.append(f"y: all labels are '{values[0]}', so there is nothing to learn.")
    _check_likely(values, len(everything))
    return found, values, notes


def _flat(y: NDArray[Any]) -> NDArray[Any]:
    """Return labels of shape [n, 1] as [n]; regression targets stay as they are."""
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind != "f" else y


def _known(y: NDArray[Any], names: Sequence[str]) -> NDArray[np.int64]:
    if y.dtype.kind not in "iub" or y.ndim != 1:
        raise DataError(
            f"y: type {y.dtype} and shape {y.shape}; expected one integer per example, from 0 to "
            f"{len(names) - 1}."
        )
    label_N = y.astype(np.int64)
    wrong = label_N[(label_N < 0) | (label_N >= len(names))]
    if len(wrong):
        raise DataError(f"y: the label {wrong[0]}; expected 0 to {len(names) - 1}.")
    return label_N


def _numbers(y: NDArray[Any]) -> NDArray[Any]:
    if y.dtype.kind not in "fiub":
        raise DataError(f"y: type {y.dtype}; expected numbers, since the loss is squared_error.")
    return y if y.dtype.kind == "f" else y.astype(np.float32)


def _is_one_hot(y: NDArray[Any]) -> bool:
    if y.ndim != 2 or y.shape[1] < 2 or y.dtype.kind not in "fiub":
        return False
    return bool(np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all())


def _are_few_integers(parts: Sequence[NDArray[Any]], values: NDArray[Any]) -> bool:
    if any(y.ndim != 1 for y in parts) or not np.isfinite(values).all():
        return False
    distinct = np.unique(values)
    is_likely = len(distinct) <= min(LIKELY_CLASSES, len(values) // MIN_PER_CLASS)
    return bool((distinct == np.rint(distinct)).all()) and len(distinct) > 1 and is_likely


def _coded(
    parts: Sequence[NDArray[Any]], everything: NDArray[Any]
) -> tuple[list[NDArray[Any]], tuple[str, ...]]:
    """Return each label's place among all labels, and the labels as names."""
    if everything.dtype.kind == "O":
        parts, everything = [y.astype(str) for y in parts], everything.astype(str)
    if everything.dtype.kind not in "iubfUS":
        raise DataError(f"y: type {everything.dtype}; expected numbers or strings.")
    values = np.unique(everything)
    found = [np.searchsorted(values, y).astype(np.int64) for y in parts]
    return found, tuple(_name(value) for value in values.tolist())


def _name(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value.decode() if isinstance(value, bytes) else str(value)


def _numbered(classes: int) -> tuple[str, ...]:
    return tuple(map(str, range(classes)))


def _check_likely(names: Sequence[str], examples: int) -> None:
    if len(names) > max(LIKELY_CLASSES, examples // MIN_PER_CLASS):
        raise DataError(
            f"y: {len(names)} different labels among {examples} examples; expected fewer classes. "
            "Pass regression targets as floating-point numbers, or set loss = 'squared_error'."
        )


def _note_floats(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")
    return (
        f"y: the numbers {shown} were read as classes. If they are regression targets, set "
        "loss = 'squared_error'."
    )
