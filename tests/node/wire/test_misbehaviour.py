"""Muting and counting, by a clock that the test turns."""

import logging

from fedspd.node.wire.misbehaviour import MisbehaviourTracker, RejectionLog


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def muted_for(guard, clock):
    """Seconds, to the next one."""
    seconds = 0
    while guard.muted("b"):
        clock.now += 1
        seconds += 1
    return seconds


def test_the_fifth_within_a_minute_mutes_and_no_other():
    clock = Clock()
    guard = MisbehaviourTracker(clock=clock)
    for _ in range(4):
        guard.rubbish("b")
        clock.now += 14
    assert not guard.muted("b")
    guard.rubbish("b")  # 56 seconds after the first
    assert guard.muted("b")
    assert not guard.muted("d")
    assert guard.counts == {"b": 5}


def test_old_rubbish_is_forgotten():
    clock = Clock()
    guard = MisbehaviourTracker(clock=clock)
    for _ in range(50):
        guard.rubbish("b")
        clock.now += 15  # never more than four in a minute
    assert not guard.muted("b")
    assert guard.counts == {"b": 50}


def test_mutes_double_to_a_quarter_of_an_hour_and_good_conduct_is_rewarded():
    clock = Clock()
    guard = MisbehaviourTracker(clock=clock)
    seconds = []
    for _ in range(2000):  # weeks of it
        for _ in range(5):
            guard.rubbish("b")
        seconds.append(muted_for(guard, clock))
    assert seconds[:6] == [60, 120, 240, 480, 900, 900]
    assert set(seconds[6:]) == {900}
    clock.now += 901
    for _ in range(5):
        guard.rubbish("b")
    assert muted_for(guard, clock) == 60


def test_refusals_are_all_counted_and_logged_once_in_ten_seconds(caplog):
    clock = Clock()
    refusals = RejectionLog(clock)
    with caplog.at_level(logging.WARNING, "fedspd.node"):
        for _ in range(21):
            refusals.note("b", "round", "round = -1.")
            refusals.note("d", "round", "round = -2.")
            refusals.note("b", "size", "too long.")
            clock.now += 1
    assert refusals.counts == {"round": 42, "size": 21}
    assert [
        record.getMessage()
        for record in caplog.records
        if "from b" in record.getMessage() and "round" in record.getMessage()
    ] == ["refused (round) from b: round = -1."] * 3  # at 0, 10 and 20 seconds
    assert len(caplog.records) == 9


def test_many_strangers_take_no_memory():
    refusals = RejectionLog(Clock())
    for number in range(5000):
        refusals.note(f"stranger {number}", "not a neighbour", "x")
    assert refusals.counts == {"not a neighbour": 5000}
    assert len(refusals._logged) <= 1000
