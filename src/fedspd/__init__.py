"""fedspd: a personalised model for every device of a network that has no server.

import fedspd
result = fedspd.run({"rounds": 10})
result.accuracy
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedspd.comparison.notebook import ComparisonResult, compare, report, sweep
    from fedspd.comparison.notebook import open_folder as open
    from fedspd.config import load
    from fedspd.core.errors import FedspdError
    from fedspd.experiment.callbacks import Callback, StopRun
    from fedspd.experiment.result import Result
    from fedspd.experiment.runner import run
    from fedspd.experiment.trackers import MLflow, TensorBoard, WeightsAndBiases

__all__ = [
    "Callback",
    "ComparisonResult",
    "FedspdError",
    "MLflow",
    "Result",
    "StopRun",
    "TensorBoard",
    "WeightsAndBiases",
    "compare",
    "load",
    "open",
    "report",
    "run",
    "sweep",
]

_MODULES = {
    "compare": "fedspd.comparison.notebook",
    "sweep": "fedspd.comparison.notebook",
    "report": "fedspd.comparison.notebook",
    "open": "fedspd.comparison.notebook",
    "ComparisonResult": "fedspd.comparison.notebook",
    "run": "fedspd.experiment.runner",
    "Result": "fedspd.experiment.result",
    "Callback": "fedspd.experiment.callbacks",
    "StopRun": "fedspd.experiment.callbacks",
    "MLflow": "fedspd.experiment.trackers",
    "TensorBoard": "fedspd.experiment.trackers",
    "WeightsAndBiases": "fedspd.experiment.trackers",
    "load": "fedspd.config",
    "FedspdError": "fedspd.core.errors",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: --help needs no torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("fedspd")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedspd' has no attribute '{name}'")
    from importlib import import_module

    # `open` is the builtin function in a module that reads files
    own = "open_folder" if name == "open" else name
    return getattr(import_module(_MODULES[name]), own)
