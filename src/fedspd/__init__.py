"""fedspd: a personalised model for every device of a network that has no server.

import fedspd
result = fedspd.run({"rounds": 10})
result.accuracy
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedspd.config import load
    from fedspd.core.errors import FedspdError
    from fedspd.experiment import Result, run

__all__ = ["FedspdError", "Result", "load", "run"]

_PLACES = {"run": "fedspd.experiment", "Result": "fedspd.experiment", "load": "fedspd.config", "FedspdError": "fedspd.core.errors"}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """torch is imported when something needs it, not when somebody asks for help."""
    if name == "__version__":
        from importlib.metadata import version

        return version("fedspd")
    if name not in _PLACES:
        raise AttributeError(f"module 'fedspd' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
