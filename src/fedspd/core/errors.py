"""Everything that fedspd refuses, as one tree.

    FedspdError
      ConfigError        a key of the config, or an argument: unknown, of the wrong type, or impossible
      MethodError        a method whose step returned something else than its contract says
      DataError          a dataset that is missing, damaged or not as promised
      TopologyError      a graph that cannot be built, or is not connected
      StorageError        a run folder that exists, is not one, or does not fit
      MissingExtraError       an optional dependency that is not installed
      WorkerError        a worker process that ended before its work was done
      NodeError          a peer that cannot start, or cannot go on
      TransportError     a neighbour that could not be asked, or that said something of no use
        UnreachableError      nobody answered in time
        RejectedError          the neighbour answered, and says why it will not do it
        MalformedError          what came breaks a rule of the wire: its size, checksum, shape, type, sender or round

A message is one sentence to a person: the key, the value, what was expected, what to do.
The command line prints it without a traceback and ends with `exit_code`.
"""

import difflib
from collections.abc import Iterable


class FedspdError(Exception):
    exit_code = 2


class ConfigError(FedspdError):
    pass


class MethodError(FedspdError):
    pass


class DataError(FedspdError):
    pass


class TopologyError(FedspdError):
    pass


class StorageError(FedspdError):
    pass


class MissingExtraError(FedspdError):
    @classmethod
    def of(cls, what: str, extra: str) -> "MissingExtraError":
        return cls(
            f"{what} needs the extra '{extra}', which is not installed: pip install 'fedspd[{extra}]'."
        )


class WorkerError(FedspdError):
    exit_code = 1


class NodeError(FedspdError):
    exit_code = 1


class TransportError(FedspdError):
    exit_code = 1


class UnreachableError(TransportError):
    pass


class RejectedError(TransportError):
    pass


class MalformedError(TransportError):
    pass


def nearest(word: str, known: Iterable[str]) -> str:
    """The ending of a sentence about an unknown word: the nearest right one, else all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"expected one of: {', '.join(known)}."
