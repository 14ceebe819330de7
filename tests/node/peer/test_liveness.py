"""The failure detector and the clocks, with a clock that the test sets."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from fedspd.node.peer import liveness
from fedspd.node.peer.liveness import (
    MAX_MISSED_DEADLINES,
    MAX_TICK_SECONDS,
    ActiveClock,
    FailureDetector,
    Pace,
    Timeouts,
)

TIMEOUTS = Timeouts(
    min_deadline=5, max_deadline=100, deadline_factor=3, heartbeat_interval=2, down_after=10
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def detector(clock: Clock) -> FailureDetector:
    return FailureDetector(TIMEOUTS, {"a": 0, "b": 1, "c": 2}, clock)


def contact(detector: FailureDetector, name: str, round: int | None = None) -> None:
    """Let a neighbour call this node, and this node reach it."""
    detector.record_message(name, round)
    detector.record_reached(name)


def test_detector_knows_no_live_neighbour_before_the_first_message(
    detector: FailureDetector,
) -> None:
    assert detector.live_neighbours() == []
    assert detector.next_failure() == float("inf")
    assert all(detector.is_heartbeat_due(name) for name in "abc")


def test_detector_marks_a_neighbour_as_down_after_ten_silent_seconds(
    detector: FailureDetector, clock: Clock
) -> None:
    contact(detector, "a")
    clock.now = 9.9
    assert detector.is_alive("a")
    clock.now = 10.0
    assert not detector.is_alive("a")


def test_detector_knows_when_the_next_neighbour_is_marked_as_down(
    detector: FailureDetector, clock: Clock
) -> None:
    contact(detector, "a")
    clock.now = 4.0
    contact(detector, "b")
    assert detector.next_failure() == 10
    contact(detector, "a")
    assert detector.next_failure() == 14
    clock.now = 14.0
    assert detector.next_failure() == float("inf")


def test_heartbeat_is_due_after_two_silent_seconds(detector: FailureDetector, clock: Clock) -> None:
    contact(detector, "a")
    clock.now = 1.9
    assert not detector.is_heartbeat_due("a")
    clock.now = 2.0
    assert detector.is_heartbeat_due("a")


def test_deadline_starts_at_its_maximum(detector: FailureDetector) -> None:
    assert detector.deadline() == 100


def test_neighbour_is_alive_only_if_both_directions_work(
    detector: FailureDetector, clock: Clock
) -> None:
    detector.record_message("a")
    detector.record_reached("b")
    assert detector.live_neighbours() == []
    assert detector.is_heartbeat_due("a")
    contact(detector, "a")
    for clock.now in (4.0, 8.0, 12.0):
        detector.record_message("a")  # it calls, but is not reached any more
    assert not detector.is_alive("a")


def test_refused_connection_marks_a_neighbour_as_down_at_once(detector: FailureDetector) -> None:
    contact(detector, "a")
    detector.record_refused("a")
    assert not detector.is_alive("a")
    contact(detector, "a")
    assert detector.is_alive("a")


def respond(detector: FailureDetector, name: str, *seconds: float) -> None:
    contact(detector, name)
    for each in seconds:
        detector.record_response(name, each)


def test_deadline_is_three_times_the_usual_response_of_the_median_neighbour(
    detector: FailureDetector,
) -> None:
    respond(detector, "a", 4.0, 4.0, 40.0)
    respond(detector, "b", 7.0)
    respond(detector, "c", 30.0)  # a straggler, or an insider that answers as late as it may
    assert detector.deadline() == 21


def test_deadline_stays_between_its_limits(detector: FailureDetector) -> None:
    respond(detector, "a", 0.01)
    assert detector.deadline() == 5
    respond(detector, "b", 1000)
    respond(detector, "c", 1000)
    assert detector.deadline() == 100


def test_deadline_forgets_old_responses(detector: FailureDetector) -> None:
    respond(detector, "a", *[30.0] * 8, *[2.0] * 8)
    assert detector.deadline() == 6


def test_missed_deadline_does_not_raise_the_next(detector: FailureDetector) -> None:
    for name in "abc":
        respond(detector, name, 2.0)
    for round in (1, 2):  # twice each: a third time, and they are stragglers, which do not count
        for name in "abc":
            detector.record_missed_deadline(name, round)
    assert detector.deadline() == 6


def test_detector_stops_waiting_for_a_straggler_until_it_responds_in_time(
    detector: FailureDetector,
) -> None:
    respond(detector, "a", 2.0)
    for round in range(1, 1 + MAX_MISSED_DEADLINES):
        assert detector.is_awaited("a")
        for _ in range(5):  # a round with several exchanges counts once
            detector.record_missed_deadline("a", round)
    assert not detector.is_awaited("a")
    respond(detector, "a", 3.0)
    assert detector.is_awaited("a")


def test_detector_waits_for_a_straggler_again_after_more_and_more_rounds(
    detector: FailureDetector,
) -> None:
    """In every round that it waits for it, the neighbour misses the deadline."""
    respond(detector, "a", 2.0)
    awaited = []
    for round in range(1, 300):
        detector.begin_round()
        if detector.is_awaited("a"):
            awaited.append(round)
            detector.record_missed_deadline("a", round)
    gaps = [later - earlier for earlier, later in pairwise(awaited)]
    assert gaps == [1, 1, 4, 8, 16, 32, 64, 64, 64]
    respond(detector, "a", 2.0)
    detector.record_missed_deadline("a", 300)
    assert detector.is_awaited("a")  # it has three deadlines again


def test_neighbour_that_only_greets_costs_its_budget_once(detector: FailureDetector) -> None:
    """It has never answered: the others need 2 seconds, and it is waited for as long as it may."""
    for name in "abc":
        contact(detector, name)
    assert detector.patience("a") == 60
    detector.charge({"a": 62.0, "b": 2.0, "c": 2.0})
    assert detector.neighbours["a"].budget_seconds == 2.0
    assert detector.neighbours["a"].waited_seconds == 60.0
    assert detector.patience("a") == 2.0
    assert detector.neighbours["b"].budget_seconds == 60.0


def test_budget_gets_a_second_in_every_round_not_in_every_exchange(
    detector: FailureDetector,
) -> None:
    """The others answer at once."""
    for name in "abc":
        contact(detector, name)
    for is_new_round, left in ((True, 51.0), (False, 41.0), (False, 31.0), (True, 22.0)):
        detector.charge({"a": 10.0, "b": 0.0, "c": 0.0}, is_new_round)
        assert detector.neighbours["a"].budget_seconds == left


def test_insider_that_answers_late_slows_the_network_at_most_twice(
    detector: FailureDetector, caplog: pytest.LogCaptureFixture
) -> None:
    """Two neighbours answer after 2 seconds, the insider as late as the node waits for it."""
    for name in "abc":
        respond(detector, name, 2.0)
    total = 0.0
    for _ in range(100):
        seconds = {"b": 2.0, "c": 2.0}
        if detector.is_awaited("a"):
            seconds["a"] = max(2.0, detector.patience("a"))
            respond(detector, "a", seconds["a"])
        detector.charge(seconds)
        total += max(seconds.values())
    assert detector.deadline() == 6
    assert total <= 100 * 2 * 2 + 60
    assert "neighbour slowed the network: node=a" in caplog.text


def test_neighbour_at_half_speed_is_always_awaited(detector: FailureDetector) -> None:
    for name in "abc":
        respond(detector, name, 2.0)
    for _ in range(1000):
        assert detector.is_awaited("a")
        detector.charge({"a": 4.0, "b": 2.0, "c": 2.0})


def test_confirmed_round_needs_a_majority_of_the_neighbours(detector: FailureDetector) -> None:
    assert detector.confirmed_round() == 0
    contact(detector, "a", 900)
    assert detector.confirmed_round() == 0  # b and c are only late; a alone may be Byzantine
    contact(detector, "b", 7)
    contact(detector, "c", 5)
    assert detector.confirmed_round() == 7
    assert detector.witnesses(7) == ["a", "b"]


def test_two_of_five_neighbours_confirm_nothing(clock: Clock) -> None:
    detector = FailureDetector(TIMEOUTS, dict(zip("abcde", range(5), strict=True)), clock)
    for name, round in {"a": 900, "b": 900, "c": 4, "d": 3, "e": 4}.items():
        contact(detector, name, round)
    assert detector.confirmed_round() == 4


def test_pace_believes_ten_times_the_own_fastest_round(clock: Clock) -> None:
    pace = Pace(clock)
    assert pace.plausible_round() > 10**6  # a newcomer knows no pace
    pace.record_round(4.0)
    pace.record_round(2.0)
    pace.record_in_step(7)
    assert pace.plausible_round() == 7
    clock.now = 5.0
    assert pace.plausible_round() == 7 + 25


def test_pace_counts_the_time_away(clock: Clock) -> None:
    pace = Pace(clock)
    pace.record_return(4, [2.0, 3.0], away_seconds=60.0)
    assert pace.plausible_round() == 4 + 300
    pace.record_return(4, [2.0, 3.0], away_seconds=-60.0)  # the wall clock was set back
    assert pace.plausible_round() == 4


def test_confirmed_round_needs_one_neighbour_after_the_quorum_timeout(
    detector: FailureDetector, clock: Clock
) -> None:
    contact(detector, "b", 3)
    clock.now = TIMEOUTS.start - 1
    contact(detector, "a", 9)
    assert detector.confirmed_round() == 0  # c may only be late, b was there a while ago
    clock.now += 1
    contact(detector, "a", 9)
    assert detector.confirmed_round() == 9
    contact(detector, "c", 4)
    assert detector.confirmed_round() == 4  # c is back: two neighbours again


def test_confirmed_round_follows_a_shorter_quorum_timeout(clock: Clock) -> None:
    detector = FailureDetector(TIMEOUTS, {"a": 0, "b": 1}, clock, quorum_timeout=5)
    contact(detector, "a", 9)
    assert detector.confirmed_round() == 0
    clock.now = 5
    contact(detector, "a", 9)
    assert detector.confirmed_round() == 9


def test_confirmed_round_counts_a_live_neighbour_that_is_silent_for_the_quorum_timeout(
    clock: Clock,
) -> None:
    detector = FailureDetector(TIMEOUTS, {"a": 0, "b": 1}, clock, quorum_timeout=5)
    contact(detector, "b", 4)
    clock.now = 6
    contact(detector, "a", 9)
    assert detector.confirmed_round() == 4


def test_confirmed_round_trusts_an_only_neighbour(clock: Clock) -> None:
    detector = FailureDetector(TIMEOUTS, {"a": 0}, clock)
    assert detector.confirmed_round() == 0
    contact(detector, "a", 900)
    assert detector.confirmed_round() == 900
    assert FailureDetector(TIMEOUTS, {}, clock).confirmed_round() == 0


@pytest.fixture
def system_time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=clock))
    return clock


def test_active_clock_skips_a_suspension_of_the_process(system_time: Clock) -> None:
    clock = ActiveClock()
    system_time.now = 60.0
    assert clock() == MAX_TICK_SECONDS


def test_active_clock_counts_the_time_between_frequent_readings(system_time: Clock) -> None:
    clock = ActiveClock()
    for tenth in range(1, 21):
        system_time.now = tenth / 10
        clock()
    assert clock.seconds == pytest.approx(2.0)


def test_neighbour_that_starts_late_is_no_one_way_link(
    detector: FailureDetector, clock: Clock
) -> None:
    """It calls before it is called: a new network must not begin its first round without it."""
    clock.now += 60
    detector.record_message("a", 1)
    assert not detector.is_half_open("a")
    clock.now += TIMEOUTS.down_after
    assert detector.is_half_open("a")  # only now: it was never reached
    assert not detector.is_half_open("b")
