"""Imports: objects of the user's own code, given as module:name, and quick ones of the program."""

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from fedspd.core.errors import FedspdError, nearest

FROM_PYTHON = "from Python: "  # begins the name of data or a model that were passed as an object


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without the garbage collector, which would scan all modules again and again.

    That takes a quarter of an import of torch. Modules stay, so no later collection scans them
    either. A process that has torch already is left alone: it may hold garbage.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


_may_use_current_folder = ContextVar("_may_use_current_folder", default=True)


@contextmanager
def installed_code_only() -> Iterator[None]:
    """Load objects from installed modules and PYTHONPATH alone, as a node does.

    Its config comes from another machine, and anyone may have put a file into the folder where it
    is started.
    """
    token = _may_use_current_folder.set(False)
    try:
        yield
    finally:
        _may_use_current_folder.reset(token)


def load_object(what: str, spec: str, error: type[FedspdError]) -> Callable[..., Any]:
    """Return the function or class behind `spec`; `what` is the key that it was given for."""
    module_name, _, name = spec.partition(":")
    module = _import(what, spec, module_name, error)
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


def _import(what: str, spec: str, module_name: str, error: type[FedspdError]) -> ModuleType:
    if "/" in module_name or module_name.endswith(".py"):
        name = os.path.basename(module_name).removesuffix(".py")
        raise error(
            f"{what} = '{spec}': a path; expected the name of a module, such as '{name}:NAME'. Run "
            "in its folder, or name that folder in PYTHONPATH."
        )
    is_open = _may_use_current_folder.get()
    with _search_path(is_open):
        if not is_open and not _is_installed(module_name):
            raise error(
                f"{what} = '{spec}': the module is not installed; a node uses no code of the "
                "current folder. Install the module on every device, or name its folder in "
                "PYTHONPATH."
            )
        try:
            return importlib.import_module(module_name)
        except Exception as reason:
            raise error(
                f"{what} = '{spec}': the import failed with {type(reason).__name__}: {reason}; "
                "expected a module that is installed or in the current folder."
            ) from reason


def _is_installed(module_name: str) -> bool:
    """Return whether the search path has a module, even if it is imported already."""
    name = module_name.partition(".")[0]
    return any(finder.find_spec(name, None) is not None for finder in sys.meta_path)


@contextmanager
def _search_path(is_open: bool) -> Iterator[None]:
    """Let imports find modules in the current folder, or never there.

    A console script does not look there; `python -m` and `python -c` do.
    """
    before, folder = list(sys.path), os.getcwd()
    if is_open:
        sys.path.insert(0, folder)
    elif sys.path[:1] in ([""], [folder]):
        del sys.path[0]
    try:
        yield
    finally:
        sys.path[:] = before


# The tables of a config that all methods share; every other one has the options of a method.
SHARED_TABLES = ("data", "topology", "model", "training", "exchange", "privacy")


def options_table(method: str) -> str:
    """Return the table of a config that has a method's options; module:Class has no own table."""
    return "options" if ":" in method else method
