"""What releases cost: epsilon at delta, by Rényi differential privacy.

Opacus computes the Rényi divergence of Gaussian noise on Poisson samples, and turns it into
epsilon. Divergences add up, so that a bill may be written round by round. Where no sampling is
involved, epsilon has a closed form (Balle & Wang; ICML 2018), which is exact.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspd.core.errors import ConfigError, MissingExtraError
from fedspd.core.mechanism import Release

ORDERS = [1 + x / 20 for x in range(1, 200)] + [float(x) for x in range(11, 65)]
ORDERS += [80.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 768.0, 1024.0, 2048.0, 4096.0]
MOST_NOISE = 100.0  # with small batches: above it a model learns nothing
LEAST_NOISE = 0.05  # below it epsilon has no meaning
PRECISION = 1e-4  # of the noise that a budget asks for, relative


def epsilon(releases: Iterable[Release], delta: float, order: float | None = None) -> float:
    """Return the epsilon of all releases together; 0 if there are none.

    order   of the divergence that counts, one of ORDERS; None: the one that gives the least
    """
    paid = [release for release in releases if release.times]
    if not paid:
        return 0.0
    if order is None and all(release.rate == 1 for release in paid):
        return gaussian_epsilon(math.sqrt(sum(r.times / r.noise**2 for r in paid)), delta)
    found, _ = _least_epsilon(paid, delta, ORDERS if order is None else [order])
    return max(0.0, found)


def best_order(releases: Iterable[Release], delta: float) -> float | None:
    """Return the order at which these releases cost the least; None: none of them is sampled."""
    paid = [release for release in releases if release.times]
    if all(release.rate == 1 for release in paid):
        return None
    _, order = _least_epsilon(paid, delta, ORDERS)
    return order


def _least_epsilon(
    paid: Sequence[Release], delta: float, orders: Sequence[float]
) -> tuple[float, float]:
    """Return the least epsilon that one of these orders gives, and this order."""
    counts: dict[tuple[float, float], int] = {}
    for release in paid:
        name = release.noise, release.rate
        counts[name] = counts.get(name, 0) + release.times
    total = sum(count * divergence(*name) for name, count in counts.items())
    chosen = np.asarray(total)[[ORDERS.index(order) for order in orders]]
    with warnings.catch_warnings():  # that the best order is the first or the last one
        warnings.simplefilter("ignore")
        found, order = _analysis().get_privacy_spent(orders=orders, rdp=chosen, delta=delta)
    return float(found), float(order)


@cache
def divergence(noise: float, rate: float) -> NDArray[np.float64]:
    """Return the Rényi divergence of one release, at ORDERS."""
    found = _analysis().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS)
    return np.asarray(found, dtype=float)


def _analysis() -> Any:
    handlers = list(logging.root.handlers)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from opacus.accountants.analysis import rdp
    except ImportError:
        raise MissingExtraError.of("[privacy]: the accountant", "privacy") from None
    finally:  # opacus adds one, and every line would be logged twice
        logging.root.handlers[:] = handlers
    return rdp


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the epsilon of Gaussian noise whose means are mu standard deviations apart."""
    from scipy.optimize import brentq  # here: a run without privacy starts sooner
    from scipy.special import log_ndtr

    def excess(epsilon: float) -> float:
        """Return the log of delta(epsilon), minus the log of delta."""
        a, b = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        with np.errstate(divide="ignore"):  # where noise is next to nothing
            return float(a + np.log1p(-np.exp(min(b - a, -1e-300)))) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta)) + 1
    return float(brentq(excess, 0.0, high, xtol=1e-9 * max(1.0, high)))


def noise_for(
    budget: float,
    delta: float,
    releases_at: Callable[[float], Sequence[Sequence[Release]]],
    most: float = MOST_NOISE,
) -> float:
    """Return the least noise whose releases, round by round, stay within a budget.

    releases_at   noise -> the releases of every round
    most          the largest noise that makes sense
    """

    def cost(noise: float, rounds: int | None = None) -> float:
        planned = releases_at(noise)[:rounds]
        return epsilon((release for own in planned for release in own), delta)

    if cost(most) > budget:
        rounds = len(releases_at(most))
        permitted = sum(cost(most, t) <= budget for t in range(1, rounds))
        asked, expected = "even one round, which needs", "a larger budget"
        if permitted:
            asked, expected = f"{rounds} rounds, which need", f"rounds = {permitted} at most"
        raise ConfigError(
            f"privacy.epsilon = {budget}: too small for {asked} noise above {most:g} times the "
            f"clip; expected {expected}. Set that, fewer local epochs or a lower privacy.rate."
        )
    low, high = LEAST_NOISE, most
    while high / low > 1 + PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= budget else (middle, high)
    return high
