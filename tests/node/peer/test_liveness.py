"""Who is waited for, and how long: with a clock that the test turns."""

import time

import pytest

from fedspd.node.peer.liveness import CHANCES, LAPSE, ActiveClock, FailureDetector, Timeouts

PATIENCE = Timeouts(least=5, most=100, factor=3, beat=2, silence=10)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> FailureDetector:
    return FailureDetector(PATIENCE, {"a": 0, "b": 1, "c": 2}, clock)


def test_nobody_is_alive_before_a_sign_of_life(watch: FailureDetector) -> None:
    assert watch.living() == []
    assert all(watch.quiet(name) for name in "abc")


def test_a_neighbour_is_believed_dead_after_ten_seconds_of_silence(
    watch: FailureDetector, clock: Clock
) -> None:
    watch.sign_of_life("a")
    clock.now = 9.9
    assert watch.alive("a")
    clock.now = 10.0
    assert not watch.alive("a")


def test_a_heartbeat_is_due_when_nothing_else_was_heard(
    watch: FailureDetector, clock: Clock
) -> None:
    watch.sign_of_life("a")
    clock.now = 1.9
    assert not watch.quiet("a")
    clock.now = 2.0
    assert watch.quiet("a")


def test_the_first_deadline_is_the_longest(watch: FailureDetector) -> None:
    assert watch.deadline() == 100


def test_the_deadline_is_three_times_what_the_slowest_living_neighbour_took(
    watch: FailureDetector, clock: Clock
) -> None:
    for name, seconds in {"a": 4.0, "b": 7.0}.items():
        watch.sign_of_life(name)
        watch.in_time(name, seconds)
    assert watch.deadline() == 21
    clock.now = 8.0
    watch.sign_of_life("a")
    clock.now = 12.0  # b was last seen twelve seconds ago, a four
    assert watch.deadline() == 12


def test_the_deadline_stays_between_its_limits(watch: FailureDetector) -> None:
    watch.sign_of_life("a")
    watch.in_time("a", 0.01)
    assert watch.deadline() == 5
    watch.in_time("a", 1000)
    assert watch.deadline() == 100


def test_old_waits_are_forgotten(watch: FailureDetector) -> None:
    watch.sign_of_life("a")
    for seconds in [30.0] + [2.0] * 8:
        watch.in_time("a", seconds)
    assert watch.deadline() == 6


def test_one_that_is_late_again_and_again_is_no_longer_waited_for_until_it_is_in_time(
    watch: FailureDetector,
) -> None:
    for name in "ab":
        watch.sign_of_life(name)
        watch.in_time(name, 2.0)
    for _ in range(CHANCES):
        assert watch.worth_waiting("a")
        watch.too_late("a", 20.0)
    assert not watch.worth_waiting("a")
    assert watch.deadline() == 6  # b's alone
    watch.in_time("a", 3.0)
    assert watch.worth_waiting("a")


def test_the_front_needs_two_witnesses_where_there_are_two(watch: FailureDetector) -> None:
    assert watch.front() == 0
    watch.sign_of_life("a", 900)
    assert watch.front() == 0  # b and c are only late: who is there alone may lie
    watch.sign_of_life("b", 7)
    watch.sign_of_life("c", 5)
    assert watch.front() == 7


def test_a_lone_witness_is_believed_when_no_other_has_come_for_as_long_as_a_network_takes_to_start(
    watch: FailureDetector, clock: Clock
) -> None:
    watch.sign_of_life("b", 3)
    clock.now = PATIENCE.start - 1
    watch.sign_of_life("a", 9)
    assert watch.front() == 0  # c may only be late, b was there a while ago
    clock.now += 1
    watch.sign_of_life("a", 9)
    assert watch.front() == 9
    watch.sign_of_life("c", 4)
    assert watch.front() == 4  # c is there again: two witnesses, as ever


def test_a_shorter_hope_believes_sooner(clock: Clock) -> None:
    watch = FailureDetector(PATIENCE, {"a": 0, "b": 1}, clock, hope=PATIENCE.least)
    watch.sign_of_life("a", 9)
    assert watch.front() == 0
    clock.now = PATIENCE.least
    watch.sign_of_life("a", 9)
    assert watch.front() == 9


def test_what_a_process_slept_through_is_nobodys_silence() -> None:
    clock = ActiveClock()
    before = clock()
    time.sleep(2 * LAPSE)
    assert clock() - before == pytest.approx(LAPSE)


def test_time_that_is_looked_at_counts() -> None:
    clock, started = ActiveClock(), time.monotonic()
    while time.monotonic() - started < 0.2:
        clock()
    assert 0.15 < clock.seconds <= 0.25


def test_an_only_neighbour_is_believed(clock: Clock) -> None:
    watch = FailureDetector(PATIENCE, {"a": 0}, clock)
    assert watch.front() == 0
    watch.sign_of_life("a", 900)
    assert watch.front() == 900
    assert FailureDetector(PATIENCE, {}, clock).front() == 0
