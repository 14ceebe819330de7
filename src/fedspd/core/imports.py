"""A user's own object, load_object as module:name."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedspd.core.errors import FedspdError, nearest


def load_object(what: str, spec: str, error: type[FedspdError]) -> Callable[..., Any]:
    """The function or class behind spec; `what` says in messages where the name was given."""
    place, _, name = spec.partition(":")
    try:
        with _current_folder_importable():
            module = importlib.import_module(place)
    except Exception as reason:
        raise error(
            f'{what} = "{spec}": expected a module that is installed or in the current folder, '
            f"but its import failed with {type(reason).__name__}: {reason}"
        ) from reason
    known = {
        key: value
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_")
    }
    if name not in known:
        hint = nearest(name, known) if known else "it has none at all."
        raise error(
            f"{what} = \"{spec}\": the module '{place}' has no public function or class '{name}'; {hint}"
        )
    found: Callable[..., Any] = known[name]
    return found


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """A console script does not look into the current folder, where a user's module lies; undone after the import."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def options_table(method: str) -> str:
    """Where a config has the options of a method: one that is given as module:Class has no table of its own name."""
    return "options" if ":" in method else method
