"""How long a node waits, and for whom. Times are seconds of one's own clock: no two clocks are ever compared."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

REMEMBERED = 8  # exchanges
CHANCES = 3  # exchanges in a row that a neighbour may be late and is still waited for
LAPSE = 0.25  # seconds: whatever is longer between two looks at the clock was this process's own absence


@dataclass(frozen=True)
class Timeouts:
    """Limits in seconds; tests use smaller ones."""

    start: float = 120.0  # for the neighbours to appear when a network starts
    least: float = 10.0  # a deadline is never shorter,
    most: float = 120.0  # and never longer
    factor: float = 3.0  # times what the slowest neighbour took lately
    beat: float = 2.0  # between two heartbeats to a neighbour that says nothing else
    silence: float = 10.0  # without a sign of life, a neighbour is believed dead
    leave: float = 60.0  # after the last round, for those that are behind


class ActiveClock:
    """A clock that runs only while this process looks at it: what it sleeps through, or is kept from, is nobody's silence."""

    def __init__(self) -> None:
        self.seconds, self._last = 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self._last, LAPSE)
        self._last = now
        return self.seconds


@dataclass
class Neighbour:
    """What is known of one neighbour."""

    name: str
    client: int
    round: int = 0  # that it works on
    seen: float | None = None  # when it last gave a sign of life
    late: int = 0  # exchanges in a row that it missed
    waits: deque[float] = field(
        default_factory=lambda: deque(maxlen=REMEMBERED)
    )  # how long its part of an exchange took


class FailureDetector:
    """Who is alive, and when waiting for them ends."""

    def __init__(
        self,
        patience: Timeouts,
        neighbours: dict[str, int],
        clock: Callable[[], float],
        hope: float | None = None,
    ) -> None:
        """`hope`: seconds for which a neighbour that is not there may still come and bear witness; default: as when a network starts."""
        self.patience, self.clock = patience, clock
        self.hope, self.born = patience.start if hope is None else hope, clock()
        self.neighbours: dict[str, Neighbour] = {}
        for name, client in neighbours.items():
            self.meet(name, client)

    def meet(self, name: str, client: int) -> None:
        self.neighbours[name] = Neighbour(name, client)

    def sign_of_life(self, name: str, round: int | None = None) -> None:
        neighbour = self.neighbours[name]
        neighbour.seen = self.clock()
        if round is not None:
            neighbour.round = round

    def alive(self, name: str) -> bool:
        seen = self.neighbours[name].seen
        return seen is not None and self.clock() - seen < self.patience.silence

    def living(self) -> list[Neighbour]:
        return [neighbour for name, neighbour in self.neighbours.items() if self.alive(name)]

    def quiet(self, name: str) -> bool:
        """Whether it is time for a heartbeat."""
        seen = self.neighbours[name].seen
        return seen is None or self.clock() - seen >= self.patience.beat

    def in_time(self, name: str, seconds: float) -> None:
        self.neighbours[name].late = 0
        self.neighbours[name].waits.append(seconds)

    def too_late(self, name: str, seconds: float) -> None:
        self.neighbours[name].late += 1
        self.neighbours[name].waits.append(seconds)

    def worth_waiting(self, name: str) -> bool:
        """One that is late again and again is heard when it is in time, but no longer waited for."""
        return self.alive(name) and self.neighbours[name].late < CHANCES

    def deadline(self) -> float:
        """Adapts to the slowest that is worth waiting for; one that was too late counts as long as it was waited for."""
        slowest = [max(n.waits) for n in self.living() if n.waits and n.late < CHANCES]
        expected = self.patience.factor * max(slowest) if slowest else self.patience.most
        return min(max(expected, self.patience.least), self.patience.most)

    def front(self) -> int:
        """The round that the living have reached, by two witnesses: one could lie. One is believed where no other is to be hoped for."""
        rounds = sorted((neighbour.round for neighbour in self.living()), reverse=True)
        needed = min(2, sum(self._hoped_for(neighbour) for neighbour in self.neighbours.values()))
        return rounds[needed - 1] if len(rounds) >= needed > 0 else 0

    def _hoped_for(self, neighbour: Neighbour) -> bool:
        since = self.born if neighbour.seen is None else neighbour.seen
        return self.clock() - since < self.hope or self.alive(neighbour.name)
