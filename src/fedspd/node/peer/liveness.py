"""Liveness: which neighbours are up, and how long a node waits for them.

Times are seconds of this node's own clock. Clocks of two nodes are never compared.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

log = logging.getLogger("fedspd.node")

RESPONSES_KEPT = 8  # response times of a neighbour that the deadline adapts to
MAX_MISSED_DEADLINES = 3  # in a row, after which a neighbour is a straggler
MIN_REST_ROUNDS, MAX_REST_ROUNDS = 4, 64  # until a node waits for a straggler again
MIN_REFUND_SECONDS = 1.0  # of a budget, in every round
MAX_PACE_RATIO = 10  # how much faster than this node its neighbours may be
MIN_ROUND_SECONDS = 0.001
MAX_TICK_SECONDS = 0.25  # a longer gap between two readings: the process was suspended


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a peer in seconds; tests use smaller ones."""

    start: float = 120.0  # seconds for the neighbours to appear when a network starts
    min_deadline: float = 10.0  # seconds, lower bound of the deadline of an exchange
    max_deadline: float = 120.0  # seconds, its upper bound
    deadline_factor: float = 3.0  # deadline as a multiple of the neighbours' usual response
    budget: float = 60.0  # seconds that a node waits for one neighbour beyond the others, in all
    heartbeat_interval: float = 2.0  # seconds between heartbeats to a neighbour that is silent
    down_after: float = 10.0  # seconds without a message, then a neighbour is marked as down
    linger: float = 60.0  # seconds after the last round, for neighbours that are behind


class ActiveClock:
    """A clock that counts only the time in which this process runs.

    Whenever the process is suspended, neighbours seem silent without being so. Therefore one
    reading advances the clock by at most MAX_TICK_SECONDS, and it must be read that often.
    """

    def __init__(self) -> None:
        self.seconds, self._last = 0.0, time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self._last, MAX_TICK_SECONDS)
        self._last = now
        return self.seconds


@dataclass
class Neighbour:
    """The knowledge about one neighbour."""

    name: str
    client: int
    round: int = 0  # that it works on
    first_contact: float | None = None  # time of the first call from it, or to it that succeeded
    last_seen: float | None = None  # time of its last call
    last_reached: float | None = None  # time of the last call to it that succeeded
    missed_deadlines: int = 0  # in a row, at most one in a round
    missed_round: int = 0  # the last round in which it missed a deadline
    rest_rounds: int = 0  # until the node waits for it again, as a straggler
    response_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RESPONSES_KEPT))
    budget_seconds: float = 0.0  # that are left
    waited_seconds: float = 0.0  # beyond the others, in all

    @property
    def usual_seconds(self) -> float:
        """Its usual response time; 0 before the first."""
        return median(self.response_seconds) if self.response_seconds else 0.0


class Pace:
    """The rounds that a network can have reached, by this node's own rounds and clocks.

    A node does not know how fast its neighbours are. It believes that they are up to
    MAX_PACE_RATIO times as fast as its own fastest round, since it was last in step with them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._round, self._since = 0, clock()
        self._fastest_seconds: float | None = None

    def record_return(self, round: int, seconds: Iterable[float], away_seconds: float) -> None:
        """Note the last round, how long those before took, and how long ago it ended."""
        self._round, self._since = round, self.clock() - max(0.0, away_seconds)
        for each in seconds:
            self.record_round(each)

    def record_in_step(self, round: int) -> None:
        """Note that the network is in this round now."""
        self._round, self._since = round, self.clock()

    def record_round(self, seconds: float) -> None:
        """Note how long a round took."""
        known, seconds = self._fastest_seconds, max(seconds, MIN_ROUND_SECONDS)
        self._fastest_seconds = seconds if known is None else min(known, seconds)

    def plausible_round(self) -> int:
        """Return the latest round that the network can be in; any, before the first own one."""
        if self._fastest_seconds is None:
            return sys.maxsize
        passed = self.clock() - self._since
        return self._round + int(MAX_PACE_RATIO * passed / self._fastest_seconds)


class FailureDetector:
    """The detector that decides which neighbours are up and when waiting for them ends."""

    def __init__(
        self,
        timeouts: Timeouts,
        neighbours: dict[str, int],
        clock: Callable[[], float],
        quorum_timeout: float | None = None,
    ) -> None:
        """Watch neighbours, given by name and client number.

        For `quorum_timeout` seconds, by default `timeouts.start`, a neighbour that is down may
        still come back and confirm the round of the others.
        """
        self.timeouts, self.clock = timeouts, clock
        self.quorum_timeout = timeouts.start if quorum_timeout is None else quorum_timeout
        self.started = clock()
        self.neighbours: dict[str, Neighbour] = {}
        for name, client in neighbours.items():
            self.add(name, client)

    def end_join(self) -> None:
        """Wait as long for a quorum as all nodes do: a newcomer soon trusts a single neighbour."""
        self.quorum_timeout = self.timeouts.start

    def add(self, name: str, client: int) -> None:
        """Watch one more neighbour."""
        self.neighbours[name] = Neighbour(name, client, budget_seconds=self.timeouts.budget)

    def record_message(self, name: str, round: int | None = None) -> None:
        """Note that a neighbour called, and the round that it works on if it says so."""
        neighbour = self.neighbours[name]
        neighbour.last_seen = self._note_contact(neighbour)
        if round is not None:
            neighbour.round = round

    def record_reached(self, name: str, round: int | None = None) -> None:
        """Note that a call to a neighbour succeeded, and the round that its answer says."""
        neighbour = self.neighbours[name]
        neighbour.last_reached = self._note_contact(neighbour)
        if round is not None:
            neighbour.round = round

    def _note_contact(self, neighbour: Neighbour) -> float:
        """Return the time now, which is that of the first contact if there was none."""
        now = self.clock()
        if neighbour.first_contact is None:
            neighbour.first_contact = now
        return now

    def record_refused(self, name: str) -> None:
        """Note that nobody listens at the neighbour's address: it is down at once."""
        self.neighbours[name].last_reached = None

    def record_response(self, name: str, seconds: float) -> None:
        """Note that a neighbour answered in time, and how long it took."""
        neighbour = self.neighbours[name]
        neighbour.missed_deadlines = neighbour.rest_rounds = 0
        neighbour.response_seconds.append(seconds)

    def record_missed_deadline(self, name: str, round: int) -> None:
        """Note that a neighbour did not answer in time; this does not raise the next deadline.

        A straggler rests for more and more rounds. Where nobody waits for it, it may be a little
        late for ever, so the node then waits for it again.
        """
        neighbour = self.neighbours[name]
        if neighbour.missed_round == round:
            return
        neighbour.missed_deadlines += 1
        neighbour.missed_round = round
        if (excess := neighbour.missed_deadlines - MAX_MISSED_DEADLINES) >= 0:
            neighbour.rest_rounds = min(MIN_REST_ROUNDS * 2**excess, MAX_REST_ROUNDS)

    def begin_round(self) -> None:
        """Note that a round begins, which brings the next wait for a straggler nearer."""
        for neighbour in self.neighbours.values():
            neighbour.rest_rounds = max(0, neighbour.rest_rounds - 1)

    def charge(self, seconds: Mapping[str, float], is_new_round: bool = True) -> None:
        """Charge each neighbour for the wait beyond the usual one of an exchange.

        A neighbour that costs no more than the round itself is never charged for long.
        """
        for name, neighbour in self.neighbours.items():
            others = [each for other, each in seconds.items() if other != name]
            usual = median(others) if others else neighbour.usual_seconds
            extra = max(0.0, seconds.get(name, 0.0) - usual)
            refund = max(usual, MIN_REFUND_SECONDS) if is_new_round else usual
            before, half = neighbour.budget_seconds, self.timeouts.budget / 2
            neighbour.budget_seconds = min(before - extra + refund, self.timeouts.budget)
            neighbour.waited_seconds += extra
            if neighbour.budget_seconds < half <= before:
                log.warning(
                    "neighbour slowed the network: node=%s waited_seconds=%.1f",
                    name,
                    neighbour.waited_seconds,
                )

    def is_alive(self, name: str) -> bool:
        """Return whether a neighbour called and was reached lately; otherwise it is down."""
        return self.clock() < self._down_at(self.neighbours[name])

    def is_half_open(self, name: str) -> bool:
        """Return whether a neighbour has started, but one direction of the link never worked."""
        first = self.neighbours[name].first_contact
        return first is not None and self.clock() - first >= self.timeouts.down_after

    def live_neighbours(self) -> list[Neighbour]:
        """Return the neighbours that are alive."""
        now = self.clock()
        return [each for each in self.neighbours.values() if now < self._down_at(each)]

    def next_failure(self) -> float:
        """Return the time at which the next live neighbour is marked as down if it is silent."""
        return min(map(self._down_at, self.live_neighbours()), default=float("inf"))

    def is_heartbeat_due(self, name: str) -> bool:
        """Return whether a neighbour was not reached, or silent, for the heartbeat interval."""
        contact = _last_contact(self.neighbours[name])
        return self.clock() - contact >= self.timeouts.heartbeat_interval

    def is_awaited(self, name: str) -> bool:
        """Return whether an exchange waits for a neighbour: it is alive and does not rest."""
        neighbour = self.neighbours[name]
        has_time = neighbour.budget_seconds > 0
        return self.is_alive(name) and has_time and not neighbour.rest_rounds

    def deadline(self) -> float:
        """Return the seconds that an exchange may take, by the neighbours' usual responses.

        Their median counts, so that a minority cannot slow the others down.
        """
        usual = [
            neighbour.usual_seconds
            for neighbour in self.live_neighbours()
            if neighbour.response_seconds and not _is_straggler(neighbour)
        ]
        limits = self.timeouts
        expected = limits.deadline_factor * median(usual) if usual else limits.max_deadline
        return min(max(expected, limits.min_deadline), limits.max_deadline)

    def patience(self, name: str) -> float:
        """Return the seconds for which an exchange waits for a neighbour.

        One that has never answered may need longer at first, but has a budget as all others.
        """
        neighbour, limits = self.neighbours[name], self.timeouts
        deadline = self.deadline() if neighbour.response_seconds else limits.max_deadline
        return min(deadline, max(neighbour.budget_seconds, 0.0))

    def confirmed_round(self) -> int:
        """Return the latest round that a majority of the neighbours reached, or 0.

        The others may be Byzantine. A neighbour that was silent for the quorum timeout does not
        count, so that a single one is trusted in the end if no other is expected.
        """
        rounds = sorted((neighbour.round for neighbour in self.live_neighbours()), reverse=True)
        needed = 1 + sum(map(self._may_confirm, self.neighbours.values())) // 2
        return rounds[needed - 1] if len(rounds) >= needed else 0

    def witnesses(self, round: int) -> list[str]:
        """Return the live neighbours that say they have reached a round."""
        return sorted(each.name for each in self.live_neighbours() if each.round >= round)

    def _may_confirm(self, neighbour: Neighbour) -> bool:
        since = self.started if neighbour.last_seen is None else neighbour.last_seen
        return self.clock() - since < self.quorum_timeout or self.is_alive(neighbour.name)

    def _down_at(self, neighbour: Neighbour) -> float:
        return _last_contact(neighbour) + self.timeouts.down_after


def _last_contact(neighbour: Neighbour) -> float:
    """Return the time until which both directions of a link are known to work."""
    if neighbour.last_seen is None or neighbour.last_reached is None:
        return float("-inf")
    return min(neighbour.last_seen, neighbour.last_reached)


def _is_straggler(neighbour: Neighbour) -> bool:
    return neighbour.missed_deadlines >= MAX_MISSED_DEADLINES
