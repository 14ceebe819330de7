"""Mute neighbours that keep sending malformed messages, and count and log rejections."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger("fedspd.node")
LOG_INTERVAL_SECONDS = 10.0  # between two log lines about the same sender and reason
THRESHOLD, WINDOW_SECONDS = 5, 60.0  # malformed messages that mute a neighbour
MUTE_SECONDS, MAX_MUTE_SECONDS = 60.0, 900.0
MAX_LOGGED = 1000  # senders and reasons that are remembered

Clock = Callable[[], float]  # seconds


@dataclass
class Offences:
    """The recent malformed messages and the last mute of one neighbour, in seconds of the clock."""

    times: deque[float] = field(default_factory=deque)
    mute_seconds: float = 0.0
    muted_until: float = 0.0


class MisbehaviourTracker:
    """Mutes a neighbour after THRESHOLD malformed messages within WINDOW_SECONDS.

    The first mute lasts MUTE_SECONDS; each further one lasts twice as long as the one before.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.counts: Counter[str] = Counter()  # malformed messages by neighbour
        self._offences: dict[str, Offences] = {}

    def record_malformed(self, name: str) -> None:
        """Count a malformed message of a neighbour, and mute the neighbour at the threshold."""
        self.counts[name] += 1
        offences, now = self._offences.setdefault(name, Offences()), self.clock()
        offences.times.append(now)
        while offences.times[0] <= now - WINDOW_SECONDS:
            offences.times.popleft()
        if len(offences.times) >= THRESHOLD:
            self._mute(name, offences, now)

    def is_muted(self, name: str) -> bool:
        """Return whether the neighbour is muted now."""
        return name in self._offences and self.clock() < self._offences[name].muted_until

    def _mute(self, name: str, offences: Offences, now: float) -> None:
        is_first = not offences.mute_seconds or now > offences.muted_until + MAX_MUTE_SECONDS
        doubled = min(2 * offences.mute_seconds, MAX_MUTE_SECONDS)
        offences.mute_seconds = MUTE_SECONDS if is_first else doubled
        offences.muted_until = now + offences.mute_seconds
        offences.times.clear()
        log.warning(
            "neighbour muted: node=%s seconds=%d malformed=%d window_seconds=%d",
            name,
            offences.mute_seconds,
            THRESHOLD,
            WINDOW_SECONDS,
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
