"""Checks of what the steps of a method return, so that a mistake becomes a sentence.

Shapes: C clients in the block, K models offered by each, M clusters wanted, P parameters of a
model.
"""

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor, nn

from fedspd.core.algorithm import AnyAlgorithm, Observation, Round
from fedspd.core.errors import MethodError
from fedspd.core.exchange import Exchange


def check_state(algorithm: AnyAlgorithm, step: str, state: Any, clients: int) -> Any:
    """Return the state if it is a dataclass of tensors with one row per client."""
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        raise _wrong(algorithm, step, f"returned {_kind(state)}", "a dataclass of tensors")
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if not isinstance(value, Tensor) or value.shape[:1] != (clients,):
            found = f"returned a state whose field '{field.name}' is {_kind(value)}"
            expected = f"a tensor with one row for each of the {clients} clients"
            raise _wrong(algorithm, step, found, expected)
    return state


def check_round(algorithm: AnyAlgorithm, started: Any) -> Round[Any]:
    """Return what `round` returned if it is a generator."""
    if not isinstance(started, Generator):
        found = f"returned {_kind(started)}"
        expected = "a generator; yield an Exchange, or write 'yield' below the return"
        raise _wrong(algorithm, "round", found, expected)
    return started


def check_exchange(algorithm: AnyAlgorithm, asked: Any, clients: int) -> Exchange:
    """Return what `round` yielded if it is an Exchange with one row per client."""
    if not isinstance(asked, Exchange):
        raise _wrong(algorithm, "round", f"yielded {_kind(asked)}", "an Exchange")
    size = {"C": clients}  # of every axis, by its letter
    for name in ("model_CKP", "cluster_CK", "weight_CK", "want_CM", "note_C"):
        axes, table = name.rpartition("_")[2], getattr(asked, name)
        if table is None and name == "note_C":
            continue
        shape = tuple(table.shape) if isinstance(table, Tensor) else ()
        is_right = len(shape) == len(axes)
        if not is_right or any(
            size.setdefault(a, n) != n for a, n in zip(axes, shape, strict=True)
        ):
            found = f"yielded an Exchange whose {name} is {_kind(table)}"
            known = ", ".join(f"{axis} = {size[axis]}" for axis in axes if axis in size)
            raise _wrong(algorithm, "round", found, f"the axes {axes} with {known}")
    return asked


def check_outputs(algorithm: AnyAlgorithm, outputs: Any, x: Sequence[Tensor]) -> list[Tensor]:
    """Return what `predict` returned if it has one output per example of every client."""
    rows = [len(own) for own in x]
    found = [len(own) for own in outputs] if isinstance(outputs, Sequence) else _kind(outputs)
    if found != rows:
        expected = f"a list of tensors with {rows} rows, one tensor per client"
        raise _wrong(algorithm, "predict", f"returned {found}", expected)
    return list(outputs)


def check_observation(algorithm: AnyAlgorithm, seen: Any) -> Observation:
    """Return what `observe` returned if it is an Observation."""
    if not isinstance(seen, Observation):
        raise _wrong(algorithm, "observe", f"returned {_kind(seen)}", "an Observation")
    return seen


def check_personal_model(algorithm: AnyAlgorithm, module: Any) -> nn.Module | None:
    """Return what `personal_model` returned if it is a module or None."""
    if module is not None and not isinstance(module, nn.Module):
        raise _wrong(algorithm, "personal_model", f"returned {_kind(module)}", "a module or None")
    return module


def _wrong(algorithm: AnyAlgorithm, step: str, found: str, expected: str) -> MethodError:
    return MethodError(f"{type(algorithm).__name__}.{step} {found}; expected {expected}.")


def _kind(value: Any) -> str:
    """Return the type of a value, and the shape of a tensor, in words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"
