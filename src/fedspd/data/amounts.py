"""Numbers of examples for every client: integers only, without the examples themselves.

Shapes: C clients, D distributions, K components, which are counted apart (distributions, classes).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedspd.core.errors import ConfigError
from fedspd.core.keys import Key
from fedspd.data.options import ShareRule

Counts = NDArray[np.int64]
Shares = NDArray[np.float64]

MIN_EXAMPLES = 2  # training examples of any client
STEPS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Clients:
    """The clients that share the data, newcomers included.

    amount_C   the training examples of every client
    newcomers  how many of them, the last ones, join after training
    """

    amount_C: Counts
    newcomers: int = 0

    def __len__(self) -> int:
        return len(self.amount_C)


def apportion(weight_RK: Shares | Counts, total_R: Counts) -> Counts:
    """Return integers in proportion to each row of weights, by largest remainder.

    Row r adds up to total_R[r]. If all weights of a row are 0, its total must be 0 too.
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
    """Return the training examples of every client, `examples` on average.

    The clients form three groups in the ratio 1 : (1 + r) / 2 : r, with r the imbalance. Every
    client has at least MIN_EXAMPLES.
    """
    group_C = key.numpy().permutation(np.arange(clients) % 3)
    factor_C = np.array([1.0, imbalance, (1 + imbalance) / 2])[group_C]
    ideal_C = factor_C / factor_C.mean() * examples
    above_C = np.maximum(ideal_C - MIN_EXAMPLES, 0)
    above_total = np.array([clients * (examples - MIN_EXAMPLES)])
    amount_C: Counts = MIN_EXAMPLES + apportion(above_C[None], above_total)[0]
    return amount_C


def client_shares(rule: ShareRule, clients: int, distributions: int, key: Key) -> Shares:
    """Return each client's share of each distribution, for clients that mix them.

    Rows add up to 1.
    """
    if rule == "steps":
        return _stepped_shares(clients, distributions)
    if rule == "dirichlet":
        return key.numpy().dirichlet(np.ones(distributions), clients)
    draw_CD = key.numpy().uniform(0.1, 0.9, (clients, distributions))
    if distributions == 2:
        draw_CD[:, 1] = 1 - draw_CD[:, 0]
    draw_CD /= draw_CD.sum(axis=1, keepdims=True)
    return draw_CD


def pure_shares(size_D: Sequence[int], clients: int, newcomers: int, key: Key) -> Shares:
    """Return shares of 0 and 1: every client belongs to one population, at random.

    The populations have sizes in proportion to size_D, among the clients that train and among the
    newcomers.
    """
    random, weight_D = key.numpy(), np.array([size_D])
    groups = [apportion(weight_D, np.array([n]))[0] for n in (clients - newcomers, newcomers)]
    members = [random.permutation(np.repeat(np.arange(len(n_D)), n_D)) for n_D in groups]
    shares_CD: Shares = np.eye(len(size_D))[np.concatenate(members)]
    return shares_CD


def _stepped_shares(clients: int, distributions: int) -> Shares:
    if distributions != 2:
        raise ConfigError(
            f"data.shares = 'steps': defined for 2 distributions only, and there are "
            f"{distributions}; expected 'uniform', 'pure' or 'dirichlet'."
        )
    first_C = np.resize(STEPS, clients)
    return np.stack([first_C, 1 - first_C], axis=1)


def class_preferences(alpha: float, clients: int, classes: int, key: Key) -> Shares:
    """Return each client's preference for each class, drawn from Dirichlet(alpha)."""
    return key.numpy().dirichlet(np.full(classes, alpha), clients)


def shard_counts(size_K: Counts, amount_C: Counts, shards: int, key: Key) -> Counts:
    """Return each client's examples of each class when label-sorted shards are assigned at random.

    The sorted list is a sample with the classes in their true proportions. It is as large as the
    amounts of all clients together, and is cut into `shards` shards per client. The size of a
    shard follows from its owner's amount.
    """
    clients = len(amount_C)
    order = key.numpy().permutation(clients * shards)
    shard_size = apportion(np.ones((clients, shards)), amount_C).ravel()[order]
    owner = np.repeat(order // shards, shard_size)
    class_size_K = apportion(size_K[None], amount_C.sum(keepdims=True))[0]
    label = np.repeat(np.arange(len(size_K)), class_size_K)
    count_CK = np.zeros((clients, len(size_K)), dtype=np.int64)
    np.add.at(count_CK, (owner, label), 1)
    return count_CK


def fill(preference_CK: Shares | Counts, amount_C: Counts, size_K: Counts) -> Counts:
    """Return each client's examples of each component, by preference and within size_K.

    Every client gets exactly its amount. A component that is requested too often is split in
    proportion to the requests. Clients make up for the rest from the components that have examples
    left, again by preference. The amounts must not exceed the sizes.
    """
    count_CK = np.zeros(preference_CK.shape, dtype=np.int64)
    missing_C = amount_C
    while missing_C.any():  # every iteration exhausts a component or is the last
        left_K = size_K - count_CK.sum(axis=0)
        requested_CK = apportion(_available_preference(preference_CK, left_K), missing_C)
        granted_K = np.minimum(requested_CK.sum(axis=0), left_K)
        count_CK += apportion(requested_CK.T, granted_K).T
        missing_C = amount_C - count_CK.sum(axis=1)
    return count_CK


def _available_preference(preference_CK: Shares | Counts, left_K: Counts) -> Shares | Counts:
    """Return the preference among components that have examples left.

    A client that prefers none of these takes them in proportion to what is left.
    """
    available_CK = np.where(left_K > 0, preference_CK, 0)
    prefers_none_C1 = ~available_CK.any(axis=1, keepdims=True)
    return np.where(prefers_none_C1, left_K, available_CK)
