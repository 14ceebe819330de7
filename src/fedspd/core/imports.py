"""Objects of the user's own code, given as module:name."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedspd.core.errors import FedspdError, nearest

FROM_PYTHON = "from Python: "  # begins the name of data or a model that were passed as an object


def load_object(what: str, spec: str, error: type[FedspdError]) -> Callable[..., Any]:
    """Return the function or class behind `spec`; `what` is the key that it was given for."""
    module_name, _, name = spec.partition(":")
    try:
        with _current_folder_importable():
            module = importlib.import_module(module_name)
    except Exception as reason:
        raise error(
            f"{what} = '{spec}': the import failed with {type(reason).__name__}: {reason}; "
            "expected a module that is installed or in the current folder."
        ) from reason
    known = {
        key: value
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_")
    }
    if name not in known:
        hint = nearest(name, known) if known else "it has none."
        raise error(
            f"{what} = '{spec}': the module '{module_name}' has no public function or class "
            f"'{name}'; {hint}"
        )
    found: Callable[..., Any] = known[name]
    return found


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Let imports find modules in the current folder, where a console script does not look."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def options_table(method: str) -> str:
    """Return the table of a config that has a method's options; module:Class has no own table."""
    return "options" if ":" in method else method
