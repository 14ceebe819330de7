"""Means, confidence intervals and paired differences of plain numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

Numbers = Sequence[float | None]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and the half-width of its 95 % confidence interval, which a single number lacks."""

    mean: float | None
    half: float | None


def mean(numbers: Numbers) -> float | None:
    """Return the mean of the known numbers, or None if there are none."""
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else None


def confidence_interval(numbers: Numbers) -> Interval:
    """Return the mean and its interval by Student's t, both unknown if a number is missing."""
    if not numbers or None in numbers:
        return Interval(None, None)
    values = np.array(numbers, dtype=float)
    n = len(values)
    if n == 1:
        return Interval(float(values[0]), None)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)
    return Interval(float(values.mean()), float(quantile * values.std(ddof=1) / math.sqrt(n)))


def paired_difference(
    scores: Mapping[int, float | None], reference: Mapping[int, float | None]
) -> Interval:
    """Return scores minus reference over the seeds that both have."""
    pairs = [(scores[seed], reference[seed]) for seed in scores if seed in reference]
    differences = [None if a is None or b is None else a - b for a, b in pairs]
    return confidence_interval(differences)
