"""The errors that fedspd raises on purpose, as one tree under FedspdError.

A message is one sentence for the user: `key = value: problem; expected X. Fix.`
The command line prints it without a traceback and exits with `exit_code`.
"""

import difflib
from collections.abc import Iterable

SHOWN_AT_MOST = 40  # names in a sentence; the config's top level has fewer


class FedspdError(Exception):
    """The base of all errors of fedspd."""

    exit_code = 2


class ConfigError(FedspdError):
    """A config key or an argument that is unknown, of the wrong type or impossible."""


class MethodError(FedspdError):
    """A step of a method that returns something else than its contract says."""


class DataError(FedspdError):
    """A dataset that is missing, damaged or not as declared."""


class TopologyError(FedspdError):
    """A graph that cannot be built, or is not connected."""


class StorageError(FedspdError):
    """A run folder that exists, is not one, or does not fit."""


class MissingExtraError(FedspdError):
    """An optional dependency that is not installed."""

    @classmethod
    def of(cls, what: str, extra: str) -> "MissingExtraError":
        """Return the error for a feature that needs an extra of the package."""
        return cls(
            f"{what} needs the extra '{extra}', which is not installed: "
            f"pip install 'fedspd[{extra}]'."
        )


class WorkerError(FedspdError):
    """A worker process that ended before its work was done."""

    exit_code = 1


class NodeError(FedspdError):
    """A node that cannot start, or cannot go on."""

    exit_code = 1


class TransportError(FedspdError):
    """A neighbour that did not give a usable answer."""

    exit_code = 1


class UnreachableError(TransportError):
    """A neighbour that did not answer in time."""


class RefusedError(UnreachableError):
    """A neighbour at whose address nobody listens, or whose address does not exist."""


class RejectedError(TransportError):
    """A neighbour that refused a call, and says why."""


class MalformedError(TransportError):
    """A message that breaks a rule of the wire."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word: the nearest known one, or many."""
    known = sorted(known)
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    shown, more = ", ".join(known[:SHOWN_AT_MOST]), len(known) - SHOWN_AT_MOST
    return f"expected one of: {shown}{f', and {more} more' if more > 0 else ''}."
