"""Partition sources among clients, without replacement, as a mixture says.

Shapes: C clients, K components of the mixture, P pools, N examples of all clients together.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedspd.core.errors import ConfigError, DataError
from fedspd.core.keys import Key
from fedspd.data.amounts import (
    MIN_EXAMPLES,
    Clients,
    Counts,
    Shares,
    apportion,
    client_amounts,
    fill,
)
from fedspd.data.federation import (
    Distribution,
    Federation,
    Indices,
    Partition,
    build_federation,
)
from fedspd.data.mixtures import MIXTURE_BUILDERS, Mixture, Pool
from fedspd.data.options import DataOptions, MixtureName
from fedspd.data.sources import Source

MAX_DEFAULT_EXAMPLES = 300

# The options that only some mixtures have.
MIXTURE_OPTIONS: dict[str, tuple[MixtureName, ...]] = {
    "distributions": ("permutation", "colour"),
    "rotations": ("rotation",),
    "swap": ("permutation",),
    "alpha": ("dirichlet",),
    "shards": ("shards",),
    "second": ("pair",),
}
ONE_DISTRIBUTION = ("dirichlet", "shards", "iid", "given")  # mixtures without populations
NOT_OF_GIVEN = ("examples", "test_examples", "imbalance")  # fixed by the data
# Left out of the description if not set, so that partitions from before keep their hash.
UNDESCRIBED_UNLESS_SET = ("populations", "rotations", "swap")
READING = {"name", "second", "inputs", "target", "client", "augment", "validation"}


def federate(
    source: Source,
    options: DataOptions,
    clients: int,
    key: Key,
    second: Source | None = None,
    newcomers: int = 0,
) -> Federation:
    """Return the training and test examples of every client.

    The last `newcomers` of the clients join after training.
    """
    sources = [source] if second is None else [source, second]
    mixture_name = options.mixture or default_mixture(sources)
    options = options.model_copy(update={"mixture": mixture_name})
    _check_mixture_options(options, mixture_name)
    _check_sources(options, clients, sources)
    key = key.of("mixture")
    if options.mixture == "given":
        return _federate_given(source, options, clients, key, newcomers)
    examples = options.examples or _default_examples(source, clients)
    amount_C = _amounts(options, clients, examples, key)
    mixture = MIXTURE_BUILDERS[options.mixture](sources, options, Clients(amount_C, newcomers), key)
    train_counts_CK = _train_counts(mixture, options, examples, sources, amount_C, key)
    test_counts_CK = _test_counts(mixture, options, examples, sources, train_counts_CK)
    train = assign(mixture, train_counts_CK, mixture.pools(sources, "train"), key.of("train"))
    test = assign(mixture, test_counts_CK, mixture.pools(sources, "test"), key.of("test"))
    resolved = _described_options(options) | {"clients": clients, "examples": examples}
    about = sources, resolved, key.seed, mixture.distributions, train, test
    return build_federation(*about, is_scaled=options.scale == "standard")


def default_mixture(sources: Sequence[Source]) -> MixtureName:
    """Return the mixture of data whose config names none."""
    first = sources[0]
    if first.owners is not None:
        return "given"
    if len(sources) == 2:
        return "pair"
    if len(first.shape) == 3 and first.shape[1] == first.shape[2]:
        return "rotation"
    return "dirichlet" if first.classes else "iid"


def _federate_given(
    source: Source, options: DataOptions, clients: int, key: Key, newcomers: int
) -> Federation:
    """Return the examples of the clients that the data came with; of more, a random choice."""
    owners = source.owners
    assert owners is not None
    order = np.arange(len(owners.names))
    if clients < len(order) or newcomers:
        order = key.of("clients").numpy().permutation(order)[:clients]
    trained = clients - newcomers
    chosen = np.concatenate([np.sort(order[:trained]), np.sort(order[trained:])])
    train, test = (_own_examples(part, chosen) for part in (owners.train, owners.test))
    resolved = _described_options(options) | {"clients": clients}
    about = [source], resolved, key.seed, (Distribution("all"),), train, test
    names = [owners.names[client] for client in chosen]
    return build_federation(*about, is_scaled=options.scale == "standard", names=names)


def _own_examples(owner_N: Indices, clients: Indices) -> Partition:
    rows = [np.flatnonzero(owner_N == client) for client in clients]
    start = np.concatenate([[0], np.cumsum([len(own) for own in rows])])
    index = np.concatenate(rows)
    return Partition(start, index, np.zeros(len(index), np.int64))


def _described_options(options: DataOptions) -> dict[str, Any]:
    described = options.model_dump(exclude=READING)
    unset = [name for name in UNDESCRIBED_UNLESS_SET if described[name] is None]
    unset += ["scale"] if options.scale == "none" else []
    return {name: value for name, value in described.items() if name not in unset}


def _default_examples(source: Source, clients: int) -> int:
    """Return 80 % of an even share.

    The rest allows some clients more of one distribution than an even share of it.
    """
    even_share = len(source.train.y) / clients
    return max(MIN_EXAMPLES, min(MAX_DEFAULT_EXAMPLES, int(0.8 * even_share)))


# --- numbers of examples ---


class Shortage(NamedTuple):
    """A pool with fewer examples than all clients together request."""

    pool: str
    requested: int
    available: int


def _amounts(options: DataOptions, clients: int, examples: int, key: Key) -> Counts:
    return client_amounts(clients, examples, options.imbalance, key.of("groups"))


def _train_counts(
    mixture: Mixture,
    options: DataOptions,
    examples: int,
    sources: Sequence[Source],
    amount_C: Counts,
    key: Key,
) -> Counts:
    pools = mixture.pools(sources, "train")

    def fits(fewer: int) -> bool:
        return _shortage(mixture, _amounts(options, len(amount_C), fewer, key), pools) is None

    if shortage := _shortage(mixture, amount_C, pools):
        largest = _largest(fits, MIN_EXAMPLES, examples)
        raise _too_many("data.examples", examples, shortage, largest)
    return _counts(mixture, mixture.shares, amount_C, pools)


def _test_counts(
    mixture: Mixture,
    options: DataOptions,
    train_examples: int,
    sources: Sequence[Source],
    train_counts_CK: Counts,
) -> Counts:
    pools, clients = mixture.pools(sources, "test"), len(train_counts_CK)

    def fits(examples: int) -> bool:
        return _shortage(mixture, np.full(clients, examples), pools) is None

    test_per_train = len(sources[0].test.y) / len(sources[0].train.y)
    in_proportion = max(1, round(train_examples * test_per_train))
    examples = options.test_examples or max(1, _largest(fits, 1, in_proportion + 1))
    amount_C = np.full(clients, examples)
    if shortage := _shortage(mixture, amount_C, pools):
        raise _too_many("data.test_examples", examples, shortage, _largest(fits, 1, examples))
    # If a class ran out in training, the client is tested on the classes that it trained on.
    shares_CK = train_counts_CK if mixture.is_elastic else mixture.shares
    return _counts(mixture, shares_CK, amount_C, pools)


def _counts(
    mixture: Mixture, shares_CK: Shares | Counts, amount_C: Counts, pools: Sequence[Pool]
) -> Counts:
    if mixture.is_elastic:
        return fill(shares_CK, amount_C, np.array([len(pool.members) for pool in pools]))
    return apportion(shares_CK, amount_C)


def _shortage(mixture: Mixture, amount_C: Counts, pools: Sequence[Pool]) -> Shortage | None:
    """Return the first pool with too few examples, if any."""
    size_P = [len(pool.members) for pool in pools]
    if mixture.is_elastic:
        total = Shortage("labelled", int(amount_C.sum()), sum(size_P))
        return total if total.requested > total.available else None
    request_K = apportion(mixture.shares, amount_C).sum(axis=0)
    request_P = np.bincount(mixture.pool, weights=request_K, minlength=len(pools)).astype(int)
    for pool, requested, available in zip(pools, request_P.tolist(), size_P, strict=True):
        if requested > available:
            return Shortage(pool.name, requested, available)
    return None


def _largest(fits: Callable[[int], bool], smallest: int, below: int) -> int:
    """Return the largest number from `smallest` to `below` (exclusive) that fits, or 0."""
    candidates = range(smallest, below)
    fitting = bisect_left(candidates, True, key=lambda number: not fits(number))
    return candidates[fitting - 1] if fitting else 0


def _too_many(key: str, value: int, shortage: Shortage, largest: int) -> ConfigError:
    expected = (
        f"expected at most {largest}."
        if largest
        else "even the smallest possible number does not fit. Lower clients."
    )
    return ConfigError(
        f"{key} = {value}: all clients together need {shortage.requested} '{shortage.pool}' "
        f"examples, and there are {shortage.available}; {expected}"
    )


# --- which examples ---


def assign(mixture: Mixture, count_CK: Counts, pools: Sequence[Pool], key: Key) -> Partition:
    """Assign count_CK[c, k] examples of component k to client c, each at most once.

    A client's examples are in random order.
    """
    random = key.numpy()
    clients, components = count_CK.shape
    index, cell = [], []
    for p, pool in enumerate(pools):
        from_pool_CK = np.where(np.array(mixture.pool) == p, count_CK, 0)
        cell.append(np.repeat(np.arange(clients * components), from_pool_CK.ravel()))
        index.append(random.permutation(pool.members)[: len(cell[-1])])
    client_N, component_N = np.divmod(np.concatenate(cell), components)
    order = np.lexsort((random.random(len(client_N)), client_N))
    start = np.concatenate([[0], np.cumsum(count_CK.sum(axis=1))])
    truth_N = np.array(mixture.distribution)[component_N[order]]
    return Partition(start, np.concatenate(index)[order], truth_N)


# --- checks ---


def _check_mixture_options(options: DataOptions, mixture: MixtureName) -> None:
    options.refuse_unused("data.mixture", mixture, MIXTURE_OPTIONS)
    options.refuse_unused("data.shares", options.shares, {"populations": ["pure"]})
    for name in NOT_OF_GIVEN if mixture == "given" else ():
        if (value := getattr(options, name)) != DataOptions.model_fields[name].default:
            raise ConfigError(
                f"data.{name} = {value}: the data have clients of their own, with the examples "
                "that they have. Leave it out, or set data.mixture to partition all examples again."
            )
    if options.shares in ("pure", "dirichlet") and mixture in ONE_DISTRIBUTION:
        raise ConfigError(
            f"data.shares = '{options.shares}': data.mixture = '{mixture}' has only one "
            "distribution. Leave it out."
        )


def _check_sources(options: DataOptions, clients: int, sources: Sequence[Source]) -> None:
    if options.mixture == "pair" and len(sources) == 1:
        raise ConfigError(
            "data.mixture = 'pair': data.second is missing; expected a second dataset, such as "
            "'mnist'."
        )
    _check_given(options, clients, sources[0])
    available = sum(len(source.train.y) for source in sources)
    if clients > available:
        raise ConfigError(
            f"clients + holdout_clients = {clients}: '{sources[0].name}' has only {available} "
            f"training examples; expected at most one client per example."
        )
    for source in sources:
        if source.classes == 0 and options.mixture not in ("rotation", "colour", "iid", "given"):
            raise DataError(
                f"data.mixture = '{options.mixture}': '{source.name}' is for regression and has "
                "no class labels; expected 'iid'."
            )
        if options.scale == "standard" and source.train.x.dtype == np.uint8:
            raise DataError(
                f"data.scale = 'standard': '{source.name}' has images, which are scaled from "
                "0..255 to [-1, 1]. Leave it out."
            )


def _check_given(options: DataOptions, clients: int, source: Source) -> None:
    if options.mixture != "given":
        return
    if source.owners is None:
        raise DataError(
            f"data.mixture = 'given': '{source.name}' has no clients of its own; expected a column "
            "or an array 'client', or a list, dict or folder of clients."
        )
    count = len(source.owners.names)
    if clients > count:
        raise ConfigError(
            f"clients + holdout_clients = {clients}: '{source.name}' has {count} clients of its "
            f"own; expected at most {count}. Lower clients, or set data.mixture to "
            "partition all examples again."
        )
