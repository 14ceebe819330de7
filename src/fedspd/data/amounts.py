"""How many: whole numbers of examples for every client. No data here, only counts.

Shapes: C clients, D distributions, K kinds of example that are counted apart (distributions or classes).
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedspd.core.errors import ConfigError
from fedspd.core.keys import Key

Counts = NDArray[np.int64]
Shares = NDArray[np.float64]
ShareRule = Literal["uniform", "steps"]

LEAST = 2  # training examples of any client
STEPS = (0.1, 0.3, 0.5, 0.7, 0.9)


def apportion(weight_RK: Shares | Counts, total_R: Counts) -> Counts:
    """Whole numbers in proportion to each row of weights, by largest remainder: row r adds up to total_R[r].

    Where all weights of a row are zero its total must be zero too.
    """
    sum_R = weight_RK.sum(axis=1)
    quota_RK = weight_RK / np.where(sum_R > 0, sum_R, 1)[:, None] * total_R[:, None]
    count_RK: Counts = np.floor(quota_RK).astype(np.int64)
    missing_R = total_R - count_RK.sum(axis=1)
    by_remainder_RK = np.argsort(count_RK - quota_RK, axis=1, kind="stable")
    rank_RK = np.argsort(by_remainder_RK, axis=1)
    count_RK += rank_RK < missing_R[:, None]
    return count_RK


def client_amounts(clients: int, examples: int, imbalance: float, key: Key) -> Counts:
    """Training examples of every client: three groups in the ratio 1 : (1 + r) / 2 : r, `examples` on average, each at least LEAST."""
    group_C = key.numpy().permutation(np.arange(clients) % 3)
    factor_C = np.array([1.0, imbalance, (1 + imbalance) / 2])[group_C]
    ideal_C = factor_C / factor_C.mean() * examples
    above_C = np.maximum(ideal_C - LEAST, 0)
    above_total = np.array([clients * (examples - LEAST)])
    amount_C: Counts = LEAST + apportion(above_C[None], above_total)[0]
    return amount_C


def client_shares(rule: ShareRule, clients: int, distributions: int, key: Key) -> Shares:
    """Each client's share of each distribution; rows add up to 1."""
    if rule == "steps":
        return _stepped_shares(clients, distributions)
    draw_CD = key.numpy().uniform(0.1, 0.9, (clients, distributions))
    if distributions == 2:
        draw_CD[:, 1] = 1 - draw_CD[:, 0]
    draw_CD /= draw_CD.sum(axis=1, keepdims=True)
    return draw_CD


def _stepped_shares(clients: int, distributions: int) -> Shares:
    if distributions != 2:
        raise ConfigError(
            f"data.shares = 'steps' is defined for 2 distributions and data.distributions = {distributions}: use data.shares = 'uniform'."
        )
    first_C = np.resize(STEPS, clients)
    return np.stack([first_C, 1 - first_C], axis=1)


def label_skew(alpha: float, clients: int, classes: int, key: Key) -> Shares:
    """Each client's preference for each class, from Dirichlet(alpha)."""
    return key.numpy().dirichlet(np.full(classes, alpha), clients)


def shard_counts(size_K: Counts, amount_C: Counts, shards: int, key: Key) -> Counts:
    """Sort by label, cut into `shards` shards per client, deal these at random: each client's examples of each class.

    The sorted list is a sample that is as large as all clients together want and has the classes in their true proportions.
    A shard is as large as its owner's amount asks for.
    """
    clients = len(amount_C)
    order = key.numpy().permutation(clients * shards)
    shard_size = apportion(np.ones((clients, shards)), amount_C).ravel()[order]
    owner = np.repeat(order // shards, shard_size)
    label = np.repeat(
        np.arange(len(size_K)), apportion(size_K[None], amount_C.sum(keepdims=True))[0]
    )
    count_CK = np.zeros((clients, len(size_K)), dtype=np.int64)
    np.add.at(count_CK, (owner, label), 1)
    return count_CK


def fill(preference_CK: Shares | Counts, amount_C: Counts, size_K: Counts) -> Counts:
    """Each client's examples of each kind: its exact amount, by its preference as far as size_K[k] examples of kind k reach.

    A kind that is asked for too often is split in proportion to what was asked; what a client still lacks comes from the kinds
    that have examples left, by its own preference. The amounts must not exceed the examples that there are.
    """
    count_CK = np.zeros(preference_CK.shape, dtype=np.int64)
    while (
        lacking_C := amount_C - count_CK.sum(axis=1)
    ).any():  # every turn uses up a kind or is the last
        left_K = size_K - count_CK.sum(axis=0)
        asked_CK = apportion(_among_the_left(preference_CK, left_K), lacking_C)
        count_CK += apportion(asked_CK.T, np.minimum(asked_CK.sum(axis=0), left_K)).T
    return count_CK


def _among_the_left(preference_CK: Shares | Counts, left_K: Counts) -> Shares | Counts:
    """The preference among kinds that have examples left; a client that likes none of these takes them as they come."""
    open_CK = np.where(left_K > 0, preference_CK, 0)
    likes_none_C1 = ~open_CK.any(axis=1, keepdims=True)
    return np.where(likes_none_C1, left_K, open_CK)
