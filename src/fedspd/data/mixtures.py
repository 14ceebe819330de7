"""Mixtures: which distributions there are, and each client's share of them.

A distribution says how an example of a source is transformed: rotated, relabelled, recoloured, or
not at all. A mixture has components: each takes examples from one pool and makes them examples of
one distribution. Rotation has several components and one pool, so an example is plain or rotated,
never both.

Shapes: C clients, K components.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedspd.core.errors import ConfigError, DataError
from fedspd.core.keys import Key
from fedspd.data.amounts import (
    Clients,
    Counts,
    Shares,
    class_preferences,
    client_shares,
    pure_shares,
    shard_counts,
)
from fedspd.data.federation import Distribution, Indices, PartName
from fedspd.data.options import DataOptions, MixtureName
from fedspd.data.sources import Examples, Source

ROTATIONS = (0, 90)  # by default, in degrees
ROTATION_NAMES = {0: "plain", 90: "rotated", 180: "rotated 180", 270: "rotated 270"}
CHANNEL_ORDERS = ("RGB", "BRG", "GBR", "RBG", "GRB", "BGR")  # first those that move every channel


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


# --- mixtures by name: sources, options, clients and key -> mixture ---


def rotation(
    sources: Sequence[Source], options: DataOptions, clients: Clients, key: Key
) -> Mixture:
    """Return the mixture of images at several angles."""
    _check_square_images(options, sources[0])
    angles = ROTATIONS if options.rotations is None else options.rotations
    _check_rotations(angles)
    distributions = [Distribution(ROTATION_NAMES[angle], degrees=angle) for angle in angles]
    return _of_one_pool(distributions, options, clients, key)


def parity(sources: Sequence[Source], options: DataOptions, clients: Clients, key: Key) -> Mixture:
    """Return the mixture of even and odd labels."""
    two = (Distribution("even"), Distribution("odd"))
    return Mixture(two, parity_pools, (0, 1), (0, 1), _shares(options, clients, 2, key))


def rotation_and_parity(
    sources: Sequence[Source], options: DataOptions, clients: Clients, key: Key
) -> Mixture:
    """Return the mixture of even and odd labels, one half of each rotated if clients mix two."""
    _check_square_images(options, sources[0])
    four = tuple(
        Distribution(f"{parity} {ROTATION_NAMES[angle]}", degrees=angle)
        for parity in ("even", "odd")
        for angle in ROTATIONS
    )
    if options.shares in ("pure", "dirichlet"):
        shares_C4 = _shares(options, clients, 4, key)
    else:
        shares_C4 = np.repeat(_shares(options, clients, 2, key) / 2, 2, axis=1)
    return Mixture(four, parity_pools, (0, 0, 1, 1), (0, 1, 2, 3), shares_C4)


def permutation(
    sources: Sequence[Source], options: DataOptions, clients: Clients, key: Key
) -> Mixture:
    """Return the mixture of true and permuted labels.

    All classes, or `swap` random ones, stand on a circle in random order, and distribution d moves
    each of their labels d places. So no two distributions agree on any of them.
    """
    classes, count = sources[0].classes, options.distributions
    _check_permutation(options, classes)
    circle = key.of("permutation").numpy().permutation(classes)[: options.swap]
    distributions = [Distribution("true labels")]
    for d in range(1, count):
        label = np.arange(classes)
        label[circle] = np.roll(circle, -d)
        distributions.append(Distribution(f"permuted {d}", relabel=tuple(label.tolist())))
    return _of_one_pool(distributions, options, clients, key)


def colour(sources: Sequence[Source], options: DataOptions, clients: Clients, key: Key) -> Mixture:
    """Return the mixture of colour images with their channels in several orders."""
    _check_colours(options, sources[0])
    distributions = [
        Distribution(order, channels=tuple(map("RGB".index, order)) if order != "RGB" else None)
        for order in CHANNEL_ORDERS[: options.distributions]
    ]
    return _of_one_pool(distributions, options, clients, key)


def pair(sources: Sequence[Source], options: DataOptions, clients: Clients, key: Key) -> Mixture:
    """Return the mixture of two datasets."""
    _check_pair_of_images(sources)
    two = tuple(Distribution(source.name, source=i) for i, source in enumerate(sources))
    return Mixture(two, complete_pools, (0, 1), (0, 1), _shares(options, clients, 2, key))


def dirichlet(
    sources: Sequence[Source], options: DataOptions, clients: Clients, key: Key
) -> Mixture:
    """Return one distribution, with each client's class proportions drawn from Dirichlet."""
    classes = sources[0].classes
    return _of_classes(
        classes, class_preferences(options.alpha, len(clients), classes, key.of("shares"))
    )


def shards(sources: Sequence[Source], options: DataOptions, clients: Clients, key: Key) -> Mixture:
    """Return one distribution, with each client's classes from label-sorted shards."""
    amount_C = clients.amount_C
    if options.shards > amount_C.min():
        raise ConfigError(
            f"data.shards = {options.shards}: more than the {amount_C.min()} training examples of "
            f"the smallest client; expected at most {amount_C.min()}."
        )
    size_K = np.array([len(pool.members) for pool in class_pools(sources, "train")])
    count_CK = shard_counts(size_K, amount_C, options.shards, key.of("shares"))
    return _of_classes(sources[0].classes, count_CK)


def iid(sources: Sequence[Source], options: DataOptions, clients: Clients, key: Key) -> Mixture:
    """Return one distribution, the same for all clients."""
    return Mixture((Distribution("all"),), complete_pools, (0,), (0,), np.ones((len(clients), 1)))


def _of_one_pool(
    distributions: Sequence[Distribution], options: DataOptions, clients: Clients, key: Key
) -> Mixture:
    count = len(distributions)
    shares = _shares(options, clients, count, key)
    return Mixture(tuple(distributions), complete_pools, (0,) * count, range(count), shares)


def _of_classes(classes: int, shares_CK: Shares | Counts) -> Mixture:
    one = (Distribution("all"),)
    return Mixture(one, class_pools, range(classes), (0,) * classes, shares_CK, is_elastic=True)


def _shares(options: DataOptions, clients: Clients, distributions: int, key: Key) -> Shares:
    key = key.of("shares")
    if options.shares != "pure":
        return client_shares(options.shares, len(clients), distributions, key)
    sizes = options.populations
    if sizes is not None:
        _check_populations(options, sizes, len(clients) - clients.newcomers, distributions)
    return pure_shares(sizes or [1] * distributions, len(clients), clients.newcomers, key)


MixtureBuilder = Callable[[Sequence[Source], DataOptions, Clients, Key], Mixture]
MIXTURE_BUILDERS: dict[MixtureName | None, MixtureBuilder] = {
    "rotation": rotation,
    "parity": parity,
    "rotation+parity": rotation_and_parity,
    "permutation": permutation,
    "colour": colour,
    "pair": pair,
    "dirichlet": dirichlet,
    "shards": shards,
    "iid": iid,
}


# --- checks ---


def _check_rotations(angles: Sequence[int]) -> None:
    is_known = all(angle in ROTATION_NAMES for angle in angles)
    if not is_known or len(set(angles)) < max(2, len(angles)):
        raise ConfigError(
            f"data.rotations = {angles}: expected two or more different ones of 0, 90, 180 and 270."
        )


def _check_permutation(options: DataOptions, classes: int) -> None:
    count, swap = options.distributions, options.swap
    if swap is not None and swap > classes:
        raise ConfigError(
            f"data.swap = {swap}: there are {classes} classes; expected 2 to {classes}."
        )
    limit, reason = classes, f"data.mixture = 'permutation' and {classes} classes"
    if swap is not None:
        limit, reason = swap, f"data.swap = {swap}"
    if not 2 <= count <= limit:
        raise ConfigError(
            f"data.distributions = {count}: impossible with {reason}; expected 2 to {limit}."
        )


def _check_colours(options: DataOptions, source: Source) -> None:
    if len(source.shape) != 3 or source.shape[0] != 3:
        raise DataError(
            f"data.mixture = 'colour': an example of '{source.name}' has shape {source.shape}; "
            f"expected colour images with 3 channels. Others fit {_fitting(source)}."
        )
    if not 2 <= options.distributions <= len(CHANNEL_ORDERS):
        raise ConfigError(
            f"data.distributions = {options.distributions}: impossible with data.mixture = "
            f"'colour'; expected 2 to {len(CHANNEL_ORDERS)}."
        )


def _check_populations(
    options: DataOptions, sizes: Sequence[int], clients: int, distributions: int
) -> None:
    """Refuse sizes of populations that do not fit the distributions or the clients that train."""
    if len(sizes) != distributions:
        raise ConfigError(
            f"data.populations = {sizes}: {len(sizes)} populations, and data.mixture = "
            f"'{options.mixture}' has {distributions} distributions; expected {distributions} "
            "numbers."
        )
    if sum(sizes) != clients:
        raise ConfigError(
            f"data.populations = {sizes}: {sum(sizes)} clients in all, and clients = {clients}; "
            f"expected numbers that add up to {clients}."
        )


def _check_square_images(options: DataOptions, source: Source) -> None:
    if len(source.shape) != 3 or source.shape[1] != source.shape[2]:
        raise DataError(
            f"data.mixture = '{options.mixture}': an example of '{source.name}' has shape "
            f"{source.shape}; expected square images. Other examples fit {_fitting(source)}."
        )


def _fitting(source: Source) -> str:
    """Return the mixtures that fit any examples with these targets."""
    of_classes = ("permutation", "parity", "dirichlet", "shards") if source.classes else ()
    return ", ".join(f"'{mixture}'" for mixture in (*of_classes, "iid"))


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
