"""Mute neighbours that keep sending malformed messages, and count and log rejections."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger("fedspd.node")
LOG_INTERVAL_SECONDS = 10.0  # between two log lines about the same sender and reason
MAX_LOGGED = 1000  # senders and reasons that are remembered

Clock = Callable[[], float]  # seconds


@dataclass
class Offences:
    """The recent malformed messages and the last mute of one neighbour, in seconds of the clock."""

    times: deque[float] = field(default_factory=deque)
    mute_seconds: float = 0.0
    muted_until: float = 0.0


class MisbehaviourTracker:
    """Mutes a neighbour after `threshold` malformed messages within `window_seconds`.

    The first mute lasts `mute_seconds`; each further one lasts twice as long as the one before.
    """

    def __init__(
        self,
        threshold: int = 5,
        window_seconds: float = 60.0,
        mute_seconds: float = 60.0,
        max_mute_seconds: float = 900.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.threshold, self.window_seconds = threshold, window_seconds
        self.mute_seconds, self.max_mute_seconds = mute_seconds, max_mute_seconds
        self.clock = clock
        self.counts: Counter[str] = Counter()  # malformed messages by neighbour
        self._offences: dict[str, Offences] = {}

    def record_malformed(self, name: str) -> None:
        """Count a malformed message of a neighbour, and mute the neighbour at the threshold."""
        self.counts[name] += 1
        offences, now = self._offences.setdefault(name, Offences()), self.clock()
        offences.times.append(now)
        while offences.times[0] <= now - self.window_seconds:
            offences.times.popleft()
        if len(offences.times) >= self.threshold:
            self._mute(name, offences, now)

    def is_muted(self, name: str) -> bool:
        """Return whether the neighbour is muted now."""
        return name in self._offences and self.clock() < self._offences[name].muted_until

    def _mute(self, name: str, offences: Offences, now: float) -> None:
        is_first = not offences.mute_seconds or now > offences.muted_until + self.max_mute_seconds
        doubled = min(2 * offences.mute_seconds, self.max_mute_seconds)
        offences.mute_seconds = self.mute_seconds if is_first else doubled
        offences.muted_until = now + offences.mute_seconds
        offences.times.clear()
        log.warning(
            "neighbour muted: node=%s seconds=%d malformed=%d window_seconds=%d",
            name,
            offences.mute_seconds,
            self.threshold,
            self.window_seconds,
        )


class RejectionLog:
    """Counts rejected calls and messages by reason.

    It logs the same sender and reason at most once in ten seconds, so that nobody floods the log.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self._logged_at: dict[tuple[str, str], float] = {}
        self._unlogged: Counter[str] = Counter()  # connections of strangers, by reason

    def record(self, sender: str, reason: str, sentence: str) -> None:
        """Count a rejection, and log it unless the same was logged a moment ago."""
        self.counts[reason] += 1
        now, last = self.clock(), self._logged_at.get((sender, reason))
        if last is not None and now - last < LOG_INTERVAL_SECONDS:
            return
        if len(self._logged_at) >= MAX_LOGGED:
            self._logged_at.clear()
        self._logged_at[sender, reason] = now
        log.warning('message rejected: sender=%s reason="%s" detail="%s"', sender, reason, sentence)

    def record_stranger(self, address: str, reason: str, sentence: str) -> None:
        """Count a refused connection; strangers share one line for a reason in ten seconds."""
        self.counts[reason] += 1
        now, last = self.clock(), self._logged_at.get(("", reason))
        if last is not None and now - last < LOG_INTERVAL_SECONDS:
            self._unlogged[reason] += 1
            return
        self._logged_at["", reason] = now
        log.warning(
            'connection refused: address=%s reason="%s" detail="%s" unlogged=%d',
            address, reason, sentence, self._unlogged.pop(reason, 0),
        )  # fmt: skip
