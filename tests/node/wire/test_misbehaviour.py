"""Muting and logging, by a clock that the test moves."""

import logging

from fedspd.node.wire.misbehaviour import MisbehaviourTracker, RejectionLog


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def seconds_muted(tracker, clock):
    """Move the clock until b is no longer muted, and return the seconds that it took."""
    seconds = 0
    while tracker.is_muted("b"):
        clock.now += 1
        seconds += 1
    return seconds


def test_tracker_mutes_at_the_fifth_malformed_message_within_a_minute(caplog):
    clock = Clock()
    tracker = MisbehaviourTracker(clock=clock)
    for _ in range(4):
        tracker.record_malformed("b")
        clock.now += 14
    assert not tracker.is_muted("b")
    tracker.record_malformed("b")  # 56 seconds after the first
    assert tracker.is_muted("b")
    assert not tracker.is_muted("d")
    assert tracker.counts == {"b": 5}
    assert caplog.messages == ["neighbour muted: node=b seconds=60 malformed=5 window_seconds=60"]


def test_tracker_forgets_malformed_messages_after_a_minute():
    clock = Clock()
    tracker = MisbehaviourTracker(clock=clock)
    for _ in range(50):
        tracker.record_malformed("b")
        clock.now += 15  # never more than four in a minute
    assert not tracker.is_muted("b")
    assert tracker.counts == {"b": 50}


def test_tracker_doubles_mutes_to_15_minutes_and_resets_after_good_conduct():
    clock = Clock()
    tracker = MisbehaviourTracker(clock=clock)
    seconds = []
    for _ in range(2000):  # weeks of it
        for _ in range(5):
            tracker.record_malformed("b")
        seconds.append(seconds_muted(tracker, clock))
        clock.now += 890  # of good conduct, which is too short
    assert seconds[:6] == [60, 120, 240, 480, 900, 900]
    assert set(seconds[6:]) == {900}
    clock.now += 11
    for _ in range(5):
        tracker.record_malformed("b")
    assert seconds_muted(tracker, clock) == 60


def test_rejection_log_counts_everything_and_logs_once_in_ten_seconds(caplog):
    clock = Clock()
    rejections = RejectionLog(clock)
    with caplog.at_level(logging.WARNING, "fedspd.node"):
        for _ in range(21):
            rejections.record("b", "round", "round = -1.")
            rejections.record("d", "round", "round = -2.")
            rejections.record("b", "size", "too long.")
            clock.now += 1
    assert rejections.counts == {"round": 42, "size": 21}
    line = 'message rejected: sender=b reason="round" detail="round = -1."'
    assert caplog.messages.count(line) == 3  # at 0, 10 and 20 seconds
    assert len(caplog.records) == 9


def test_rejection_log_forgets_when_many_strangers_call():
    rejections = RejectionLog(Clock())
    for number in range(5000):
        rejections.record(f"stranger {number}", "not a neighbour", "x")
    assert rejections.counts == {"not a neighbour": 5000}
    assert len(rejections._logged_at) <= 1000
