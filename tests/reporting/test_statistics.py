"""Means, intervals and paired differences."""

import pytest

from fedspd.reporting.statistics import Interval, confidence_interval, mean, paired_difference

# Quantiles of Student's t at 97.5 %, divided by the root of the number of values.
HALF_OF_TWO = 12.7062 / 2**0.5
HALF_OF_THREE = 4.302653 / 3**0.5


def test_mean_skips_missing_numbers():
    assert mean([1.0, None, 3.0]) == 2.0
    assert mean([None]) is None


def test_confidence_interval_is_students():
    three, two = confidence_interval([0.8, 0.9, 1.0]), confidence_interval([0.5, 0.7])
    assert three == Interval(pytest.approx(0.9), pytest.approx(0.1 * HALF_OF_THREE))
    deviation = 0.1 * 2**0.5
    assert two == Interval(pytest.approx(0.6), pytest.approx(deviation * HALF_OF_TWO, abs=1e-5))


def test_confidence_interval_needs_two_known_numbers():
    assert confidence_interval([0.5]) == Interval(0.5, None)
    assert confidence_interval([0.5, None]) == Interval(None, None)
    assert confidence_interval([]) == Interval(None, None)


def test_paired_difference_uses_the_common_seeds():
    """Seeds 0 and 1 differ by 0.1 and 0.2: standard deviation 0.05 times the root of 2."""
    found = paired_difference({0: 0.6, 1: 0.9, 2: 0.9}, {0: 0.5, 1: 0.7, 3: 0.1})
    deviation = 0.05 * 2**0.5
    assert found == Interval(pytest.approx(0.15), pytest.approx(deviation * HALF_OF_TWO, abs=1e-5))
    assert paired_difference({0: 0.6}, {1: 0.5}) == Interval(None, None)
