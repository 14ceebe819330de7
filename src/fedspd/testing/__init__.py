"""Test your own method; docs/api.md describes it.

from fedspd.testing import check_method
check_method(MyMethod, my_option=1.0)
"""

from typing import Any

from fedspd.testing.checks import CHECKS, Check, check_method
from fedspd.testing.strict_engine import StrictEngine
from fedspd.testing.subject import Subject

__all__ = [
    "CHECKS",
    "Check",
    "MemoryNetwork",
    "StrictEngine",
    "Subject",
    "check_method",
    "run_peers",
]


def __getattr__(name: str) -> Any:
    """Import what needs the extra `node` on first use."""
    if name in ("MemoryNetwork", "run_peers"):
        from fedspd.testing import peers

        return getattr(peers, name)
    raise AttributeError(f"module 'fedspd.testing' has no attribute '{name}'")
