"""What is measured of a run: pure functions of arrays.

Shapes: N clients, S clusters, D true distributions, P numbers in a model.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """A score over clients: mean, standard deviation, and the mean of the worst tenth of them, rounded up."""

    mean: float
    std: float
    worst: float
    lowest: float

    @classmethod
    def of(cls, score_N: Numbers) -> "Spread":
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


def relabelling(table_SD: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each cluster the distribution that it stands for, one to one where that is possible; -1: for none."""
    match = np.full(len(table_SD), -1)
    rows, columns = linear_sum_assignment(table_SD, maximize=True)
    match[rows] = columns
    return match


def purity(table_SD: NDArray[np.int64]) -> float:
    """The share of examples in the cluster that stands for their true distribution, up to relabelling."""
    total = table_SD.sum()
    rows, columns = linear_sum_assignment(table_SD, maximize=True)
    return float(table_SD[rows, columns].sum() / total) if total else np.nan


@dataclass(frozen=True)
class CenterMoments:
    """Sums over clients of their centers: all that the consensus distance needs, in any order of adding up."""

    count: int
    mean_SP: Numbers
    spread_S: Numbers  # sum of the squared distances to the mean

    @classmethod
    def of(cls, centers_CSP: Numbers) -> "CenterMoments":
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
        """E_t of Theorem 3 for every cluster: the mean squared distance of the clients' centers to their average."""
        return self.spread_S / self.count


def switched_clients(table_NSD: NDArray[np.int64]) -> NDArray[np.int64]:
    """Clients that tell the distributions apart (nine in ten right) but by other labels than the network as a whole."""
    if table_NSD.shape[1] < 2 or table_NSD.shape[2] < 2:
        return np.zeros(0, np.int64)
    rows, columns = linear_sum_assignment(table_NSD.sum(0), maximize=True)
    by_network = table_NSD[:, rows, columns].sum(1)
    by_own = np.array([purity(table) * table.sum() for table in table_NSD])
    examples = table_NSD.sum((1, 2))
    return np.flatnonzero((by_own >= 0.9 * examples) & (by_network < 0.5 * examples))
