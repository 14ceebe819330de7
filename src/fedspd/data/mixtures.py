"""Mixtures: which distributions there are, and who gets how much of each.

Two independent ideas, each small: *distributions* say how an original of a source becomes an example (turned, relabelled, or from
another source), *shares* say how much of each a client has. One dealer then deals originals, without replacement.

Shapes: C clients, D distributions, P pools of originals, K slots: each takes originals from one pool and makes examples of one
distribution. Rotation has two slots and one pool, so that an original is dealt plain or turned, never both.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf

import numpy as np

from fedspd.core.errors import ConfigError, DataError, nearest
from fedspd.core.keys import Key
from fedspd.data.amounts import (
    LEAST,
    Counts,
    ShareRule,
    Shares,
    apportion,
    client_amounts,
    client_shares,
    fill,
    label_skew,
    shard_counts,
)
from fedspd.data.federation import (
    Distribution,
    Federation,
    Indices,
    Partition,
    PartName,
    describe_partition,
    gather,
)
from fedspd.data.sources import Examples, Source


@dataclass(frozen=True)
class MixtureOptions:
    """
    mixture        a name of MIXTURES
    clients        C
    examples       training examples of a client, on average
    test_examples  test examples of every client; None: in proportion to the sizes of the source's two parts
    shares         of the first distribution: `uniform` in 10..90 %, or in `steps` of 10, 30, 50, 70, 90 % in turn
    imbalance      r: training examples of the largest client over those of the smallest
    distributions  D of `permutation`
    alpha          of `dirichlet`: the smaller, the fewer classes a client has
    shards         of `shards`: shards per client
    """

    mixture: str = "rotation"
    clients: int = 20
    examples: int = 300
    test_examples: int | None = None
    shares: ShareRule = "uniform"
    imbalance: float = 1.0
    distributions: int = 2
    alpha: float = 0.4
    shards: int = 2


@dataclass(frozen=True)
class Pool:
    """Originals of one source that are dealt at most once."""

    name: str
    members: Indices


PoolRule = Callable[[Sequence[Source], PartName], list[Pool]]


@dataclass(frozen=True)
class Recipe:
    """
    pool     [K] where each slot takes its originals from
    truth    [K] the distribution that it makes of them
    shares   [C, K] how much of each slot a client has, in proportion
    elastic  a slot that runs out is replaced by others; else that is an error
    """

    distributions: tuple[Distribution, ...]
    pools: PoolRule
    pool: Sequence[int]
    truth: Sequence[int]
    shares: Shares | Counts
    elastic: bool = False


def federate(
    source: Source, options: MixtureOptions, key: Key, second: Source | None = None
) -> Federation:
    """Partition a source's training and test examples to clients, as the options say."""
    sources = [source] if second is None else [source, second]
    _check_options(options)
    _check_sources(options, sources)
    recipe = RECIPES[options.mixture](sources, options, key.of("mixture"))
    train_counts_CK = _train_counts(recipe, options, sources, key.of("mixture"))
    test_counts_CK = _test_counts(recipe, options, sources, train_counts_CK)
    train = deal(
        recipe, train_counts_CK, recipe.pools(sources, "train"), key.of("mixture", "train")
    )
    test = deal(recipe, test_counts_CK, recipe.pools(sources, "test"), key.of("mixture", "test"))
    return Federation(
        gather([each.train for each in sources], recipe.distributions, train),
        gather([each.test for each in sources], recipe.distributions, test),
        max(each.classes for each in sources),
        len(recipe.distributions),
        describe_partition(sources, asdict(options), key.seed, recipe.distributions, train, test),
    )


# --- pools ---


def whole(sources: Sequence[Source], part: PartName) -> list[Pool]:
    return [Pool(source.name, np.arange(len(_part(source, part).y))) for source in sources]


def by_parity(sources: Sequence[Source], part: PartName) -> list[Pool]:
    label = _part(sources[0], part).y
    return [
        Pool(name, np.flatnonzero(label % 2 == odd)) for odd, name in enumerate(("even", "odd"))
    ]


def by_class(sources: Sequence[Source], part: PartName) -> list[Pool]:
    label = _part(sources[0], part).y
    return [Pool(f"class {c}", np.flatnonzero(label == c)) for c in range(sources[0].classes)]


def _part(source: Source, part: PartName) -> Examples:
    return source.train if part == "train" else source.test


# --- recipes, one per mixture ---


def rotation(sources: Sequence[Source], options: MixtureOptions, key: Key) -> Recipe:
    _need_square_images(options, sources[0])
    two = (Distribution("plain"), Distribution("rotated", rotated=True))
    return Recipe(two, whole, (0, 0), (0, 1), _shares(options, 2, key))


def parity(sources: Sequence[Source], options: MixtureOptions, key: Key) -> Recipe:
    two = (Distribution("even"), Distribution("odd"))
    return Recipe(two, by_parity, (0, 1), (0, 1), _shares(options, 2, key))


def rotation_and_parity(sources: Sequence[Source], options: MixtureOptions, key: Key) -> Recipe:
    """Each client's share of even labels is drawn; half of the even ones and half of the odd ones are rotated."""
    _need_square_images(options, sources[0])
    four = tuple(
        Distribution(f"{kind} {way}", rotated=way == "rotated")
        for kind in ("even", "odd")
        for way in ("plain", "rotated")
    )
    halves_C4 = np.repeat(_shares(options, 2, key) / 2, 2, axis=1)
    return Recipe(four, by_parity, (0, 0, 1, 1), (0, 1, 2, 3), halves_C4)


def permutation(sources: Sequence[Source], options: MixtureOptions, key: Key) -> Recipe:
    """Labels move d places along a circle on which the classes stand at random: no two distributions agree on any class."""
    classes, count = sources[0].classes, options.distributions
    if not 2 <= count <= classes:
        raise ConfigError(
            f"data.distributions = {count} does not fit data.mixture = 'permutation': expected 2 to {classes}, the classes."
        )
    circle = key.of("permutation").numpy().permutation(classes)
    place = np.argsort(circle)
    moved = [tuple(circle[(place + d) % classes].tolist()) for d in range(1, count)]
    all_of_them = (
        Distribution("true labels"),
        *(Distribution(f"permuted {d}", relabel=to) for d, to in enumerate(moved, 1)),
    )
    return Recipe(all_of_them, whole, (0,) * count, range(count), _shares(options, count, key))


def pair(sources: Sequence[Source], options: MixtureOptions, key: Key) -> Recipe:
    _need_a_pair_of_images(sources)
    two = tuple(Distribution(source.name, source=i) for i, source in enumerate(sources))
    return Recipe(two, whole, (0, 1), (0, 1), _shares(options, 2, key))


def dirichlet(sources: Sequence[Source], options: MixtureOptions, key: Key) -> Recipe:
    return _of_classes(
        sources[0], label_skew(options.alpha, options.clients, sources[0].classes, key.of("shares"))
    )


def shards(sources: Sequence[Source], options: MixtureOptions, key: Key) -> Recipe:
    amount_C = _amounts(options, options.examples, key)
    if options.shards > amount_C.min():
        raise ConfigError(
            f"data.shards = {options.shards} is more than the {amount_C.min()} training examples of the smallest client."
        )
    size_K = np.array([len(pool.members) for pool in by_class(sources, "train")])
    return _of_classes(sources[0], shard_counts(size_K, amount_C, options.shards, key.of("shares")))


def iid(sources: Sequence[Source], options: MixtureOptions, key: Key) -> Recipe:
    return Recipe((Distribution("all"),), whole, (0,), (0,), np.ones((options.clients, 1)))


def _of_classes(source: Source, shares_CK: Shares | Counts) -> Recipe:
    return Recipe(
        (Distribution("all"),),
        by_class,
        range(source.classes),
        (0,) * source.classes,
        shares_CK,
        elastic=True,
    )


def _shares(options: MixtureOptions, distributions: int, key: Key) -> Shares:
    return client_shares(options.shares, options.clients, distributions, key.of("shares"))


RECIPES: dict[str, Callable[[Sequence[Source], MixtureOptions, Key], Recipe]] = {
    "rotation": rotation,
    "parity": parity,
    "rotation+parity": rotation_and_parity,
    "permutation": permutation,
    "pair": pair,
    "dirichlet": dirichlet,
    "shards": shards,
    "iid": iid,
}

MIXTURES: dict[str, str] = {
    "rotation": "Two distributions: images as they are, and turned by 90 degrees.",
    "parity": "Two distributions: even labels, and odd labels.",
    "rotation+parity": "Four distributions: even or odd labels, each plain or turned by 90 degrees.",
    "permutation": "Two or more distributions: true labels, and labels that are permuted.",
    "pair": "Two distributions: one dataset, and a second one whose images are brought to the size and colours of the first.",
    "dirichlet": "One distribution with skewed labels: each client's class proportions are drawn from Dirichlet(alpha).",
    "shards": "One distribution with skewed labels: the examples are sorted by label, cut into shards and dealt at random.",
    "iid": "One distribution, dealt at random.",
}


# --- how many, and whether there are as many ---


def _amounts(options: MixtureOptions, examples: int, key: Key) -> Counts:
    return client_amounts(options.clients, examples, options.imbalance, key.of("groups"))


def _train_counts(
    recipe: Recipe, options: MixtureOptions, sources: Sequence[Source], key: Key
) -> Counts:
    pools = recipe.pools(sources, "train")

    def fits(examples: int) -> bool:
        return _overdrawn(recipe, _amounts(options, examples, key), pools) is None

    amount_C = _amounts(options, options.examples, key)
    if overdrawn := _overdrawn(recipe, amount_C, pools):
        raise _too_many(
            "data.examples", options.examples, overdrawn, _largest(fits, LEAST, options.examples)
        )
    return _counts(recipe, recipe.shares, amount_C, pools)


def _test_counts(
    recipe: Recipe, options: MixtureOptions, sources: Sequence[Source], train_counts_CK: Counts
) -> Counts:
    pools = recipe.pools(sources, "test")

    def fits(examples: int) -> bool:
        return _overdrawn(recipe, np.full(options.clients, examples), pools) is None

    in_proportion = max(
        1, round(options.examples * len(sources[0].test.y) / len(sources[0].train.y))
    )
    examples = options.test_examples or max(1, _largest(fits, 1, in_proportion + 1))
    amount_C = np.full(options.clients, examples)
    if overdrawn := _overdrawn(recipe, amount_C, pools):
        raise _too_many("data.test_examples", examples, overdrawn, _largest(fits, 1, examples))
    # A client whose classes ran out in training is tested on what it really has.
    return _counts(recipe, train_counts_CK if recipe.elastic else recipe.shares, amount_C, pools)


def _counts(
    recipe: Recipe, shares_CK: Shares | Counts, amount_C: Counts, pools: Sequence[Pool]
) -> Counts:
    if recipe.elastic:
        return fill(shares_CK, amount_C, np.array([len(pool.members) for pool in pools]))
    return apportion(shares_CK, amount_C)


def _overdrawn(
    recipe: Recipe, amount_C: Counts, pools: Sequence[Pool]
) -> tuple[str, int, int] | None:
    """The name of a pool of which more is asked than there is, with both numbers."""
    if recipe.elastic:
        there = sum(len(pool.members) for pool in pools)
        return ("labelled", int(amount_C.sum()), there) if amount_C.sum() > there else None
    asked_K = apportion(recipe.shares, amount_C).sum(axis=0)
    asked_P = np.bincount(recipe.pool, weights=asked_K, minlength=len(pools)).astype(int)
    over = [
        (pool.name, int(asked), len(pool.members))
        for pool, asked in zip(pools, asked_P, strict=True)
        if asked > len(pool.members)
    ]
    return over[0] if over else None


def _largest(fits: Callable[[int], bool], least: int, below: int) -> int:
    """The largest number from `least` on, under `below`, that fits; 0 if none does."""
    candidates = range(least, below)
    fitting = bisect_left(candidates, True, key=lambda number: not fits(number))
    return candidates[fitting - 1] if fitting else 0


def _too_many(key: str, value: int, overdrawn: tuple[str, int, int], largest: int) -> ConfigError:
    name, asked, there = overdrawn
    advice = (
        f"lower {key} to {largest}"
        if largest
        else "not even the least possible number fits, so lower clients"
    )
    return ConfigError(
        f"{key} = {value} asks for {asked} '{name}' examples for all clients together, and there are {there}: {advice}."
    )


# --- the dealer ---


def deal(recipe: Recipe, count_CK: Counts, pools: Sequence[Pool], key: Key) -> Partition:
    """Hand count_CK[c, k] originals of slot k's pool to client c, nobody the same one, in an order that tells nothing."""
    random = key.numpy()
    clients, slots = count_CK.shape
    index, cell = [], []
    for p, pool in enumerate(pools):
        from_pool_CK = np.where(np.array(recipe.pool) == p, count_CK, 0)
        cell.append(np.repeat(np.arange(clients * slots), from_pool_CK.ravel()))
        index.append(random.permutation(pool.members)[: len(cell[-1])])
    client_N, slot_N = np.divmod(np.concatenate(cell), slots)
    order = np.lexsort((random.random(len(client_N)), client_N))
    start = np.concatenate([[0], np.cumsum(count_CK.sum(axis=1))])
    return Partition(start, np.concatenate(index)[order], np.array(recipe.truth)[slot_N[order]])


# --- what is refused ---


ONLY = {
    "distributions": "permutation",
    "alpha": "dirichlet",
    "shards": "shards",
}  # options of one mixture


def _check_options(options: MixtureOptions) -> None:
    if options.mixture not in MIXTURES:
        raise ConfigError(
            f"data.mixture = '{options.mixture}' is unknown: {nearest(options.mixture, MIXTURES)}"
        )
    if options.shares not in ("uniform", "steps"):
        raise ConfigError(
            f"data.shares = '{options.shares}' is unknown: {nearest(options.shares, ('uniform', 'steps'))}"
        )
    _at_least("clients", options.clients, 1)
    _at_least("examples", options.examples, LEAST)
    _at_least("imbalance", options.imbalance, 1)
    _at_least("shards", options.shards, 1)
    if options.test_examples is not None:
        _at_least("test_examples", options.test_examples, 1)
    if not 0 < options.alpha < inf:
        raise ConfigError(
            f"data.alpha = {options.alpha} is impossible: expected a number above 0, such as 0.4."
        )
    for name, mixture in ONLY.items():
        value = getattr(options, name)
        if value != getattr(MixtureOptions, name) and options.mixture != mixture:
            raise ConfigError(
                f"data.{name} = {value} is for data.mixture = '{mixture}' only, and it is '{options.mixture}': leave it out."
            )


def _at_least(name: str, value: float, least: int) -> None:
    if not least <= value < inf:
        raise ConfigError(f"data.{name} = {value} is impossible: expected {least} or more.")


def _check_sources(options: MixtureOptions, sources: Sequence[Source]) -> None:
    if options.mixture == "pair" and len(sources) == 1:
        raise ConfigError(
            "data.mixture = 'pair' needs a second dataset, and data.second is missing: name one, such as 'mnist'."
        )
    if options.mixture != "pair" and len(sources) == 2:
        raise ConfigError(
            f"data.second = '{sources[1].name}' is for data.mixture = 'pair' only, and it is '{options.mixture}': leave it out."
        )
    there = sum(len(source.train.y) for source in sources)
    if options.clients > there:
        raise ConfigError(
            f"There are {options.clients} clients, those of holdout_clients included, and only {there} training examples of "
            f"'{sources[0].name}': lower clients or holdout_clients."
        )
    for source in sources:
        if source.classes == 0 and options.mixture not in ("rotation", "iid"):
            raise DataError(
                f"data.mixture = '{options.mixture}' needs class labels, and '{source.name}' is a regression: use 'iid'."
            )


def _need_square_images(options: MixtureOptions, source: Source) -> None:
    shape = source.train.x.shape[1:]
    if len(shape) != 3 or shape[1] != shape[2]:
        raise DataError(
            f"data.mixture = '{options.mixture}' needs square images, and an example of '{source.name}' has the shape {shape}."
        )


def _need_a_pair_of_images(sources: Sequence[Source]) -> None:
    for source in sources:
        if source.train.x.ndim != 4 or source.train.x.dtype != np.uint8:
            raise DataError(
                f"data.mixture = 'pair' needs images of whole numbers from 0 to 255, and '{source.name}' has none."
            )
    first, second = (source.train.x.shape[1] for source in sources)
    if second not in (1, first):
        raise DataError(
            f"data.mixture = 'pair' needs a second dataset of 1 or {first} channels, and '{sources[1].name}' has {second}."
        )
