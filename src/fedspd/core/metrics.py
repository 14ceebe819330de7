"""The metrics of a run: pure functions of arrays.

Shapes: C or N clients, S clusters, D true distributions, P parameters of a model.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """The distribution of a score over clients."""

    mean: float
    std: float
    worst: float  # mean of the worst 10 % of the clients, their number rounded up
    lowest: float

    @classmethod
    def of(cls, score_N: Numbers, is_error: bool = False) -> "Spread":
        """Return the spread of the finite scores; NaN if there are none.

        Of an error, the highest ones are the worst, and `lowest` is the highest.
        """
        if is_error:
            negated = cls.of(-score_N)
            return cls(-negated.mean, negated.std, -negated.worst, -negated.lowest)
        ordered = np.sort(score_N[np.isfinite(score_N)])
        if not len(ordered):
            return cls(np.nan, np.nan, np.nan, np.nan)
        tenth = math.ceil(len(ordered) / 10)
        return cls(
            float(ordered.mean()),
            float(ordered.std()),
            float(ordered[:tenth].mean()),
            float(ordered[0]),
        )


def best_matching(score_RC: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows and columns of the one-to-one matching with the largest sum of scores."""
    from scipy.optimize import linear_sum_assignment  # here: it takes a tenth of a run's start

    rows, columns = linear_sum_assignment(score_RC, maximize=True)
    return rows, columns


def relabelling(table_SD: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the distribution of each cluster, one to one where possible; -1 for none."""
    match = np.full(len(table_SD), -1)
    rows, columns = best_matching(table_SD)
    match[rows] = columns
    return match


def purity(table_SD: NDArray[np.int64]) -> float:
    """Return the share of examples in the cluster of their true distribution, after relabelling."""
    total = table_SD.sum()
    rows, columns = best_matching(table_SD)
    return float(table_SD[rows, columns].sum() / total) if total else np.nan


def adjusted_rand_index(table_SD: NDArray[np.int64]) -> float:
    """Return how well clusters and distributions agree on which examples belong together.

    It is 1 for the same groups under any labels and 0 on average for random ones, for any numbers
    of clusters and distributions (Hubert and Arabie, 1985).
    """
    together = _pairs(table_SD).sum()
    by_cluster, by_distribution = _pairs(table_SD.sum(1)).sum(), _pairs(table_SD.sum(0)).sum()
    total = _pairs(table_SD.sum())
    if not total:
        return np.nan
    expected, highest = by_cluster * by_distribution / total, (by_cluster + by_distribution) / 2
    # Both are a single group, or all examples are apart in both: the same groups.
    return float((together - expected) / (highest - expected)) if highest != expected else 1.0


def _pairs(count: NDArray[np.int64]) -> Numbers:
    """Return the numbers of pairs in groups of these sizes."""
    size = np.asarray(count, np.float64)
    pairs: Numbers = size * (size - 1) / 2
    return pairs


def accuracy_by_group(tests_2D: NDArray[np.int64]) -> Numbers:
    """Return the share of right test examples of each distribution, or class; NaN without any.

    tests_2D has the wrong test examples in row 0 and the right ones in row 1.
    """
    tested_D = tests_2D.sum(0)
    accuracy_D: Numbers = np.where(tested_D > 0, tests_2D[1] / np.maximum(tested_D, 1), np.nan)
    return accuracy_D


@dataclass(frozen=True)
class CenterMoments:
    """Moments of the clients' centers, which add up over blocks to the consensus distance."""

    count: int
    mean_SP: Numbers
    spread_S: Numbers  # sum of the squared distances to the mean

    @classmethod
    def of(cls, centers_CSP: Numbers) -> "CenterMoments":
        """Return the moments of a block."""
        offset_CSP = centers_CSP - centers_CSP[0]  # equal centers have a distance of exactly 0
        mean_SP = offset_CSP.mean(0)
        apart_CSP = offset_CSP - mean_SP
        return cls(
            len(centers_CSP),
            centers_CSP[0] + mean_SP,
            np.einsum("csp,csp->s", apart_CSP, apart_CSP),
        )

    def __add__(self, other: "CenterMoments") -> "CenterMoments":
        count, gap_SP = self.count + other.count, other.mean_SP - self.mean_SP
        between_S = np.einsum("sp,sp->s", gap_SP, gap_SP) * (self.count * other.count / count)
        return CenterMoments(
            count,
            self.mean_SP + gap_SP * (other.count / count),
            self.spread_S + other.spread_S + between_S,
        )

    def consensus_distance(self) -> Numbers:
        """Return E_t of Theorem 3 for every cluster.

        That is the mean squared distance of the clients' centers to their average.
        """
        return self.spread_S / self.count


def switched_clients(table_NSD: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the clients that label the clusters differently from the rest of the network.

    Such a client tells the distributions apart (90 % right, and better than with one cluster), but
    under other labels. A client of one distribution has nothing to tell apart.
    """
    if table_NSD.shape[1] < 2 or table_NSD.shape[2] < 2:
        return np.zeros(0, np.int64)
    rows, columns = best_matching(table_NSD.sum(0))
    by_network = table_NSD[:, rows, columns].sum(1)
    by_own = np.array([purity(table) * table.sum() for table in table_NSD])
    examples, largest = table_NSD.sum((1, 2)), table_NSD.sum(1).max(1)
    tells_apart = (by_own >= 0.9 * examples) & (np.rint(by_own) > largest)
    return np.flatnonzero(tells_apart & (by_network < 0.5 * examples))


# ---- scores of predictions, by name


def macro_f1(output: Numbers, y: Numbers) -> float:
    """Return the mean F1 over the classes that are among the labels or the predictions."""
    found = output.argmax(1)
    scores = []
    for k in np.union1d(y, found):
        right = np.sum((found == k) & (y == k))
        scores.append(2 * right / (np.sum(found == k) + np.sum(y == k)))
    return float(np.mean(scores)) if scores else np.nan


def auc(output: Numbers, y: Numbers) -> float:
    """Return the area under the ROC curve: of each class against the rest, and their mean.

    Classes that are absent, or the only one, have no curve; NaN if no class has one.
    """
    shifted = output - output.max(1, keepdims=True)
    chance = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    areas = [_area(chance[:, k], y == k) for k in np.unique(y) if 0 < np.sum(y == k) < len(y)]
    return float(np.mean(areas)) if areas else np.nan


def _area(score: Numbers, is_positive: NDArray[np.bool_]) -> float:
    """Return the chance that a positive example scores above a negative one; a tie is half."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]  # from 1; ties share the mean
    positives = int(is_positive.sum())
    above = rank[is_positive].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(score) - positives)))


def rmse(output: Numbers, y: Numbers) -> float:
    """Return the root of the mean squared error, over examples and values."""
    return float(np.sqrt(np.mean(np.square(output - y)))) if len(y) else np.nan


def r2(output: Numbers, y: Numbers) -> float:
    """Return the share of the variance that is explained, over all values of an example.

    NaN where the targets do not vary.
    """
    total = np.square(y - y.mean(0)).sum() if len(y) else 0.0
    return float(1 - np.square(output - y).sum() / total) if total > 0 else np.nan


CLASS_METRICS = {"macro_f1": macro_f1, "auc": auc}
REGRESSION_METRICS = {"rmse": rmse, "r2": r2}
TRAINING_ACCURACY = "training_accuracy"  # the only score that is not of the test examples
ALL_METRICS = (*CLASS_METRICS, *REGRESSION_METRICS, TRAINING_ACCURACY)
ERRORS = ("rmse",)  # the lower, the better


def score(name: str, output: Tensor, y: Tensor) -> float:
    """Return the score of outputs by its name; NaN where there is no example."""
    metric = {**CLASS_METRICS, **REGRESSION_METRICS}[name]
    return metric(output.double().cpu().numpy(), y.cpu().numpy()) if len(y) else np.nan
