"""Mixtures: which distributions there are, and each client's share of them.

A distribution says how an example of a source is transformed: rotated, relabelled, or neither. A
mixture has components: each takes examples from one pool and makes them examples of one
distribution. Rotation has two components and one pool, so an example is plain or rotated, never
both.

Shapes: C clients, K components.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedspd.core.errors import ConfigError, DataError
from fedspd.core.keys import Key
from fedspd.data.amounts import Counts, Shares, client_shares, label_skew, shard_counts
from fedspd.data.federation import Distribution, Indices, PartName
from fedspd.data.options import DataOptions, MixtureName
from fedspd.data.sources import Examples, Source


@dataclass(frozen=True)
class Pool:
    """Examples of one source, each of which is assigned at most once."""

    name: str
    members: Indices


PoolRule = Callable[[Sequence[Source], PartName], list[Pool]]


@dataclass(frozen=True)
class Mixture:
    """The components of a mixture, and each client's share of them.

    pool          [K] the pool that a component takes its examples from
    distribution  [K] the distribution that it makes them examples of
    shares        [C, K] how much of each component a client has, in proportion
    is_elastic    whether other components replace one that runs out; otherwise that is an error
    """

    distributions: tuple[Distribution, ...]
    pools: PoolRule
    pool: Sequence[int]
    distribution: Sequence[int]
    shares: Shares | Counts
    is_elastic: bool = False


# --- pools ---


def complete_pools(sources: Sequence[Source], part: PartName) -> list[Pool]:
    """Return one pool for each source, with all its examples."""
    return [Pool(source.name, np.arange(len(_part(source, part).y))) for source in sources]


def parity_pools(sources: Sequence[Source], part: PartName) -> list[Pool]:
    """Return the pools of even and of odd labels."""
    is_odd = _part(sources[0], part).y % 2
    return [Pool("even", np.flatnonzero(is_odd == 0)), Pool("odd", np.flatnonzero(is_odd == 1))]


def class_pools(sources: Sequence[Source], part: PartName) -> list[Pool]:
    """Return one pool for each class."""
    label = _part(sources[0], part).y
    return [Pool(f"class {c}", np.flatnonzero(label == c)) for c in range(sources[0].classes)]


def _part(source: Source, part: PartName) -> Examples:
    return source.train if part == "train" else source.test


# --- mixtures by name: sources, options, training examples of every client and key -> mixture ---


def rotation(
    sources: Sequence[Source], options: DataOptions, amount_C: Counts, key: Key
) -> Mixture:
    """Return the mixture of plain and rotated images."""
    _check_square_images(options, sources[0])
    two = (Distribution("plain"), Distribution("rotated", rotated=True))
    return Mixture(two, complete_pools, (0, 0), (0, 1), _shares(options, len(amount_C), 2, key))


def parity(sources: Sequence[Source], options: DataOptions, amount_C: Counts, key: Key) -> Mixture:
    """Return the mixture of even and odd labels."""
    two = (Distribution("even"), Distribution("odd"))
    return Mixture(two, parity_pools, (0, 1), (0, 1), _shares(options, len(amount_C), 2, key))


def rotation_and_parity(
    sources: Sequence[Source], options: DataOptions, amount_C: Counts, key: Key
) -> Mixture:
    """Return the mixture of even and odd labels, one half of each rotated."""
    _check_square_images(options, sources[0])
    four = tuple(
        Distribution(f"{parity} {rotation}", rotated=rotation == "rotated")
        for parity in ("even", "odd")
        for rotation in ("plain", "rotated")
    )
    half_C4 = np.repeat(_shares(options, len(amount_C), 2, key) / 2, 2, axis=1)
    return Mixture(four, parity_pools, (0, 0, 1, 1), (0, 1, 2, 3), half_C4)


def permutation(
    sources: Sequence[Source], options: DataOptions, amount_C: Counts, key: Key
) -> Mixture:
    """Return the mixture of true and permuted labels; no two distributions agree on any class.

    The classes stand on a circle in random order, and distribution d moves each label d places.
    """
    classes, count = sources[0].classes, options.distributions
    if not 2 <= count <= classes:
        raise ConfigError(
            f"data.distributions = {count}: impossible with data.mixture = 'permutation' and "
            f"{classes} classes; expected 2 to {classes}."
        )
    circle = key.of("permutation").numpy().permutation(classes)
    place = np.argsort(circle)
    moved = [tuple(circle[(place + d) % classes].tolist()) for d in range(1, count)]
    permuted = (Distribution(f"permuted {d}", relabel=to) for d, to in enumerate(moved, 1))
    distributions = (Distribution("true labels"), *permuted)
    shares = _shares(options, len(amount_C), count, key)
    return Mixture(distributions, complete_pools, (0,) * count, range(count), shares)


def pair(sources: Sequence[Source], options: DataOptions, amount_C: Counts, key: Key) -> Mixture:
    """Return the mixture of two datasets."""
    _check_pair_of_images(sources)
    two = tuple(Distribution(source.name, source=i) for i, source in enumerate(sources))
    return Mixture(two, complete_pools, (0, 1), (0, 1), _shares(options, len(amount_C), 2, key))


def dirichlet(
    sources: Sequence[Source], options: DataOptions, amount_C: Counts, key: Key
) -> Mixture:
    """Return one distribution, with each client's class proportions drawn from Dirichlet."""
    classes = sources[0].classes
    return _of_classes(classes, label_skew(options.alpha, len(amount_C), classes, key.of("shares")))


def shards(sources: Sequence[Source], options: DataOptions, amount_C: Counts, key: Key) -> Mixture:
    """Return one distribution, with each client's classes from label-sorted shards."""
    if options.shards > amount_C.min():
        raise ConfigError(
            f"data.shards = {options.shards}: more than the {amount_C.min()} training examples of "
            f"the smallest client; expected at most {amount_C.min()}."
        )
    size_K = np.array([len(pool.members) for pool in class_pools(sources, "train")])
    count_CK = shard_counts(size_K, amount_C, options.shards, key.of("shares"))
    return _of_classes(sources[0].classes, count_CK)


def iid(sources: Sequence[Source], options: DataOptions, amount_C: Counts, key: Key) -> Mixture:
    """Return one distribution, the same for all clients."""
    return Mixture((Distribution("all"),), complete_pools, (0,), (0,), np.ones((len(amount_C), 1)))


def _of_classes(classes: int, shares_CK: Shares | Counts) -> Mixture:
    one = (Distribution("all"),)
    return Mixture(one, class_pools, range(classes), (0,) * classes, shares_CK, is_elastic=True)


def _shares(options: DataOptions, clients: int, distributions: int, key: Key) -> Shares:
    return client_shares(options.shares, clients, distributions, key.of("shares"))


MixtureBuilder = Callable[[Sequence[Source], DataOptions, Counts, Key], Mixture]
MIXTURE_BUILDERS: dict[MixtureName, MixtureBuilder] = {
    "rotation": rotation,
    "parity": parity,
    "rotation+parity": rotation_and_parity,
    "permutation": permutation,
    "pair": pair,
    "dirichlet": dirichlet,
    "shards": shards,
    "iid": iid,
}


# --- checks ---


def _check_square_images(options: DataOptions, source: Source) -> None:
    if len(source.shape) != 3 or source.shape[1] != source.shape[2]:
        raise DataError(
            f"data.mixture = '{options.mixture}': an example of '{source.name}' has shape "
            f"{source.shape}; expected square images."
        )


def _check_pair_of_images(sources: Sequence[Source]) -> None:
    for source in sources:
        if source.train.x.ndim != 4 or source.train.x.dtype != np.uint8:
            raise DataError(
                f"data.mixture = 'pair': '{source.name}' has no images; expected images with "
                "integers from 0 to 255."
            )
    first, second = (source.shape[0] for source in sources)
    if second not in (1, first):
        expected = "1" if first == 1 else f"1 or {first}"
        raise DataError(
            f"data.second = '{sources[1].name}': its images have {second} channels; expected "
            f"{expected}, since '{sources[0].name}' has {first}."
        )
