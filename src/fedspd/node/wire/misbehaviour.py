"""Who has sent too much rubbish to be listened to, and what was refused."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger("fedspd.node")
QUIET = 10.0  # seconds between two log lines about the same
REMEMBERED = 1000  # things that a log line was written about


@dataclass
class Offences:
    """Of one neighbour; times are seconds of the guard's clock."""

    offences: deque[float] = field(default_factory=deque)
    mute: float = 0.0  # how long the last one was
    until: float = 0.0


class MisbehaviourTracker:
    """Mutes a neighbour after `limit` pieces of rubbish within `window` seconds: for `mute` seconds, then twice as long, and so on."""

    def __init__(
        self,
        limit: int = 5,
        window: float = 60.0,
        mute: float = 60.0,
        longest: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit, self.window, self.mute, self.longest, self.clock = (
            limit,
            window,
            mute,
            longest,
            clock,
        )
        self.counts: Counter[str] = Counter()
        self._conduct: dict[str, Offences] = {}

    def rubbish(self, name: str) -> None:
        self.counts[name] += 1
        conduct, now = self._conduct.setdefault(name, Offences()), self.clock()
        conduct.offences.append(now)
        while conduct.offences[0] <= now - self.window:
            conduct.offences.popleft()
        if len(conduct.offences) >= self.limit:
            self._silence(name, conduct, now)

    def muted(self, name: str) -> bool:
        return name in self._conduct and self.clock() < self._conduct[name].until

    def _silence(self, name: str, conduct: Offences, now: float) -> None:
        behaved = now > conduct.until + self.longest
        seconds = self.mute if behaved or not conduct.mute else min(2 * conduct.mute, self.longest)
        conduct.offences.clear()
        conduct.mute, conduct.until = seconds, now + seconds
        log.warning(
            "%s is muted for %d seconds: it sent rubbish %d times in %d seconds",
            name,
            seconds,
            self.limit,
            self.window,
        )


class RejectionLog:
    """Counted by reason; in the log at most once in ten seconds for the same sender and reason."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self._logged: dict[tuple[str, str], float] = {}

    def note(self, who: str, reason: str, sentence: str) -> None:
        self.counts[reason] += 1
        now = self.clock()
        if now - self._logged.get((who, reason), -QUIET) < QUIET:
            return
        if len(self._logged) >= REMEMBERED:
            self._logged.clear()
        self._logged[who, reason] = now
        log.warning("refused (%s) from %s: %s", reason, who, sentence)
