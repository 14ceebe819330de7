"""Audits of private training: attacks whose success puts a lower bound on epsilon.

An attack decides from what neighbours see whether an example was trained on. With (epsilon, delta)
privacy, its true positive rate is at most e^epsilon times its false positive rate, plus delta
(Kairouz et al.; ICML 2015). So rates that are too good prove that a claim is wrong.

Shapes: T trials of each kind.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom

from fedspd.privacy.accountant import gaussian_epsilon

Scores = NDArray[np.float64]
CONFIDENCE = 0.95  # of a lower bound on epsilon
SURE = 0.999  # the chance that an honest mechanism passes an audit


@dataclass(frozen=True)
class Attack:
    """The scores that an attack gives, with and without the example.

    with_T      scores where the example was trained on; they should be larger
    without_T   scores where it was not
    """

    with_T: Scores
    without_T: Scores

    def advantage(self) -> float:
        """Return the largest true positive rate minus false positive rate, over thresholds."""
        rates = [self._rates(threshold) for threshold in self._thresholds()]
        return float(max(hit - false for hit, false in rates))

    def auc(self) -> float:
        """Return the chance that a member scores higher than a non-member."""
        wins = self.with_T[:, None] > self.without_T[None]
        ties = self.with_T[:, None] == self.without_T[None]
        return float(wins.mean() + ties.mean() / 2)

    def epsilon_bound(self, delta: float) -> float:
        """Return a lower bound on epsilon that holds with CONFIDENCE.

        Half of the trials choose the threshold, and the other half are counted; both ends of the
        counts get the bounds of Clopper and Pearson.
        """
        choose, count = self._halves()
        best = max(choose._thresholds(), key=lambda value: choose.bound_at(value, delta))
        return count.bound_at(best, delta)

    def gaussian_bound(self, threshold: float, delta: float) -> float:
        """Return a lower bound on the epsilon of Gaussian noise without sampling.

        Such noise is known by one number, mu, so that it can be bounded where it shows best: half
        way between the two cases (Nasr et al.; USENIX Security 2023). The threshold must not be
        chosen by these scores.
        """
        mu = self.mu_at(threshold)
        return gaussian_epsilon(mu, delta) if mu > 0 else 0.0

    def mu_at(self, threshold: float) -> float:
        """Return a lower bound on how many standard deviations apart the two cases are."""
        hits, false = self._counts(threshold)
        high = ndtri(_lower(hits, len(self.with_T)))
        return float(high - ndtri(_upper(false, len(self.without_T))))

    def _halves(self) -> "tuple[Attack, Attack]":
        odd = Attack(self.with_T[1::2], self.without_T[1::2])
        return Attack(self.with_T[::2], self.without_T[::2]), odd

    def bound_at(self, threshold: float, delta: float) -> float:
        """Return the lower bound by one threshold: from hits above it, or from misses below."""
        hits, false = self._counts(threshold)
        T, U = len(self.with_T), len(self.without_T)
        above = _bound(_lower(hits, T), _upper(false, U), delta)
        below = _bound(_lower(U - false, U), _upper(T - hits, T), delta)
        return max(above, below, 0.0)

    def _thresholds(self) -> list[float]:
        scores = np.concatenate([self.with_T, self.without_T])
        return [float(value) for value in np.quantile(scores, np.linspace(0.02, 0.98, 49))]

    def _counts(self, threshold: float) -> tuple[int, int]:
        return int((self.with_T > threshold).sum()), int((self.without_T > threshold).sum())

    def _rates(self, threshold: float) -> tuple[float, float]:
        hits, false = self._counts(threshold)
        return hits / len(self.with_T), false / len(self.without_T)


def attainable_bound(mu: float, trials: int, delta: float) -> float:
    """Return the `gaussian_bound` that noise of this mu exceeds with the chance SURE, half way.

    It follows from the number of trials alone: an audit that stays below it is not strong enough,
    or the mechanism adds more noise than it says.
    """
    hits = int(binom.ppf((1 - SURE) / 2, trials, ndtr(mu / 2)))
    high = ndtri(_lower(hits, trials))
    found = 2 * float(high)  # false positives are as rare as misses
    return gaussian_epsilon(found, delta) if found > 0 else 0.0


def advantage_error(trials: int) -> float:
    """Return by how much an advantage is at most too large, with the chance SURE.

    It is the bound of Dvoretzky, Kiefer, Wolfowitz and Massart, for all thresholds at once.
    """
    return 2 * math.sqrt(math.log(4 / (1 - SURE)) / (2 * trials))


def permitted_advantage(epsilon: float, delta: float) -> float:
    """Return the largest advantage that any attack can have."""
    return (math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1)


def _bound(hit: float, false: float, delta: float) -> float:
    return math.log((hit - delta) / false) if hit > delta and false > 0 else -math.inf


def _lower(count: int, trials: int) -> float:
    level = (1 - CONFIDENCE) / 2
    return float(beta.ppf(level, count, trials - count + 1)) if count else 0.0


def _upper(count: int, trials: int) -> float:
    level = 1 - (1 - CONFIDENCE) / 2
    return float(beta.ppf(level, count + 1, trials - count)) if count < trials else 1.0
