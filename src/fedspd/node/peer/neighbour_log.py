"""The log lines about neighbours, rate-limited: a neighbour can cause any number of these events.

At most one line of a kind is written about a neighbour in ten seconds.
"""

import logging
import re
from collections.abc import Callable

from fedspd.core.errors import TransportError, UnreachableError
from fedspd.node.wire.misbehaviour import LOG_INTERVAL_SECONDS

log = logging.getLogger("fedspd.node")


class NeighbourLog:
    """What the log has said about each neighbour, and when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._errors: dict[str, str] = {}
        self._up: set[str] = set()  # neighbours that are up, by the log
        self._logged_at: dict[tuple[str, str], float] = {}  # by neighbour and kind

    def log_round(self, name: str, known: int, said: int) -> None:
        """Log a neighbour that says an earlier round than before."""
        if said < known and self._may_log(name, "back"):
            log.info("neighbour went back: node=%s from=%d to=%d", name, known, said)

    def log_liveness(self, name: str, is_up: bool, round: int, error: str | None) -> None:
        """Log a neighbour that went up or down since the last such line."""
        if is_up == (name in self._up) or not self._may_log(name, "up" if is_up else "down"):
            return
        if is_up:
            self._up.add(name)
            log.info("neighbour up: node=%s round=%d", name, round)
        else:
            self._up.discard(name)
            error = error or "it is silent."
            log.warning('neighbour down: node=%s round=%d error="%s"', name, round, error)

    def log_error(self, name: str, error: TransportError) -> None:
        """Log an error that is new, unless the neighbour is just down."""
        kind = re.sub(r"\d+", "", str(error))  # a node that catches up is told many rounds
        is_known = self._errors.get(name) == kind
        is_down = isinstance(error, UnreachableError)
        if not is_known and not is_down and self._may_log(name, "error"):
            self._errors[name] = kind
            log.warning('call failed: node=%s error="%s"', name, error)

    def _may_log(self, name: str, kind: str) -> bool:
        now, last = self.clock(), self._logged_at.get((name, kind))
        if last is not None and now - last < LOG_INTERVAL_SECONDS:
            return False
        self._logged_at[name, kind] = now
        return True
