"""Worlds of populations: pure and mixed clients, several angles, swapped labels, colours.

Shapes: C clients, D distributions.
"""

import hashlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fedspd
from fedspd.core.errors import ConfigError, DataError
from fedspd.core.keys import Key
from fedspd.data.amounts import client_shares, pure_shares
from fedspd.data.federation import ClientExamples, Federation
from fedspd.data.options import DataOptions
from fedspd.data.partitioning import federate
from fedspd.data.sources import Examples, Source

CLASSES = 10


def numbered(train: int = 2000, test: int = 1000, channels: int = 1) -> Source:
    """Return images whose four corners are 0, 10, 20, 30, plus 100 in the second channel and so on.

    Example i has the label i % CLASSES.
    """

    def part(count: int) -> Examples:
        corners = np.array([[0, 10], [20, 30]])
        image = np.stack([corners + 100 * channel for channel in range(channels)])
        x = np.tile(image.astype(np.uint8), (count, 1, 1, 1))
        return Examples(x, np.arange(count) % CLASSES)

    return Source("numbered", part(train), part(test), CLASSES)


def federated(clients: int = 8, seed: int = 0, newcomers: int = 0, **options: Any) -> Federation:
    source = numbered(channels=3 if options.get("mixture") == "colour" else 1)
    options = {"examples": 20, "test_examples": 10, **options}
    return federate(source, DataOptions(**options), clients, Key(seed), newcomers=newcomers)


def counts(federation: Federation, part: ClientExamples) -> NDArray[np.int64]:
    """Return count_CD: each client's examples of each distribution."""
    rows = zip(part.start[:-1], part.start[1:], strict=True)
    D = federation.distributions
    return np.stack([np.bincount(part.truth[a:b], minlength=D) for a, b in rows])


def populations(federation: Federation) -> NDArray[np.int64]:
    """Return the population of every client, which must have no example of another."""
    for part, amount in ((federation.train, 20), (federation.test, 10)):
        count_CD = counts(federation, part)
        assert set(count_CD.ravel().tolist()) == {0, amount}
    return counts(federation, federation.train).argmax(1)


def first_image(part: ClientExamples, distribution: int) -> NDArray[np.int64]:
    """Return the pixels of the first image of a distribution, as integers."""
    row = int(np.flatnonzero(part.truth == distribution)[0])
    return np.rint((part.x[row].numpy() + 1) * 127.5).astype(np.int64)


# ---- shares


@pytest.mark.parametrize(
    ("mixture", "clients", "sizes"),
    [
        ("rotation", 8, [4, 4]),
        ("parity", 9, [5, 4]),
        ("rotation+parity", 10, [3, 3, 2, 2]),
        ("colour", 7, [4, 3]),
    ],
)
def test_pure_clients_form_populations_of_equal_size(mixture, clients, sizes):
    federation = federated(clients, mixture=mixture, shares="pure")
    assert np.bincount(populations(federation)).tolist() == sizes


def test_pure_clients_form_populations_of_the_given_sizes_at_random():
    drawn = [
        populations(federated(20, seed, shares="pure", populations=[17, 3])) for seed in range(4)
    ]
    assert [np.bincount(population).tolist() for population in drawn] == [[17, 3]] * 4
    assert len({tuple(population) for population in drawn}) > 1
    again = populations(federated(20, 1, shares="pure", populations=[17, 3]))
    assert again.tolist() == drawn[1].tolist()


def test_newcomers_do_not_count_in_populations_and_get_the_same_proportions():
    # 5 newcomers in the proportion 12 : 8 are 3 and 2.
    federation = federated(25, newcomers=5, shares="pure", populations=[12, 8])
    population = populations(federation)
    assert np.bincount(population[:20]).tolist() == [12, 8]
    assert np.bincount(population[20:]).tolist() == [3, 2]
    equal = populations(federated(11, newcomers=5, shares="pure"))
    assert np.bincount(equal[:6]).tolist() == [3, 3]
    assert np.bincount(equal[6:]).tolist() == [3, 2]


def test_holdout_clients_of_a_run_are_its_newcomers():
    data = {"examples": 20, "test_examples": 5, "shares": "pure", "populations": [3, 1]}
    ring = {"kind": "ring"}
    config = {"clients": 4, "holdout_clients": 4, "rounds": 1, "data": data, "topology": ring}
    result = fedspd.run({**config, "method": "fedavg"})
    clients = result.experiment.federation.description["clients"]
    totals = [
        [client["train"]["counts"] for client in group] for group in (clients[:4], clients[4:])
    ]
    assert np.sum(totals, axis=1).tolist() == [[60, 20], [60, 20]]


def test_pure_shares_are_zero_or_one():
    shares_CD = pure_shares([1, 1, 1], 7, 0, Key(0))
    assert (
        sorted(shares_CD.tolist(), reverse=True)
        == [[1, 0, 0]] * 3 + [[0, 1, 0]] * 2 + [[0, 0, 1]] * 2
    )


def test_dirichlet_shares_are_uniform_on_the_simplex():
    """Under Dirichlet(1, 1, 1), a share has mean 1/3 and variance 2/36."""
    shares_CD = client_shares("dirichlet", 20_000, 3, Key(0))
    assert np.allclose(shares_CD.sum(1), 1)
    assert np.allclose(shares_CD.mean(0), 1 / 3, atol=0.01)
    assert np.allclose(shares_CD.var(0), 2 / 36, atol=0.002)


@pytest.mark.parametrize(
    "options",
    [
        {"mixture": "permutation", "distributions": 3},
        {"rotations": [0, 90, 180, 270]},
        {"mixture": "rotation+parity"},
        {"mixture": "parity"},
    ],
)
def test_test_examples_follow_the_shares_of_the_client(options):
    federation = federated(shares="dirichlet", **options)
    train_CD, test_CD = (
        counts(federation, part) / amount
        for part, amount in ((federation.train, 20), (federation.test, 10))
    )
    assert np.abs(train_CD - test_CD).max() < 1 / 20 + 1 / 10  # both are rounded to examples
    assert train_CD.max() > 0.6
    assert len(np.unique(train_CD, axis=0)) >= 7  # clients differ, up to rounding


# ---- distributions


def test_rotations_rotate_counterclockwise_by_their_angles():
    federation = federated(rotations=[0, 90, 180, 270], shares="pure")
    expected = {
        "plain": [[0, 10], [20, 30]],
        "rotated": [[10, 30], [0, 20]],
        "rotated 180": [[30, 20], [10, 0]],
        "rotated 270": [[20, 0], [30, 10]],
    }
    names = [each["name"] for each in federation.description["distributions"]]
    assert names == list(expected)
    for d, image in enumerate(expected.values()):
        assert first_image(federation.train, d).tolist() == [image]
        assert first_image(federation.test, d).tolist() == [image]


def test_rotations_may_leave_out_upright_images():
    federation = federated(rotations=[270, 180])
    assert first_image(federation.train, 0).tolist() == [[[20, 0], [30, 10]]]
    assert first_image(federation.train, 1).tolist() == [[[30, 20], [10, 0]]]


def relabellings(**options: Any) -> NDArray[np.int64]:
    """Return label_DC: how each distribution relabels each class."""
    records = federated(mixture="permutation", **options).description["distributions"]
    return np.array([each["relabel"] or range(CLASSES) for each in records])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("swap", "distributions"), [(2, 2), (4, 2), (4, 4), (10, 3)])
def test_swap_permutes_exactly_that_many_classes(swap, distributions, seed):
    label_DC = relabellings(swap=swap, distributions=distributions, seed=seed)
    assert (np.sort(label_DC, axis=1) == np.arange(CLASSES)).all()
    kept_C = (label_DC == np.arange(CLASSES)).all(0)
    assert kept_C.sum() == CLASSES - swap
    for swapped in label_DC[:, ~kept_C].T:
        assert len(set(swapped.tolist())) == distributions  # no two distributions agree


def test_swap_depends_on_the_seed_and_of_all_classes_is_the_whole_permutation():
    swaps = [tuple(relabellings(swap=4, seed=seed)[1]) for seed in range(6)]
    assert len(set(swaps)) > 3
    assert swaps[0] == tuple(relabellings(swap=4, seed=0)[1])
    assert (relabellings(swap=10, seed=3) == relabellings(seed=3)).all()


def test_colour_permutes_the_channels():
    federation = federated(mixture="colour", distributions=6)
    names = [each["name"] for each in federation.description["distributions"]]
    assert names == ["RGB", "BRG", "GBR", "RBG", "GRB", "BGR"]
    corner = {"R": 0, "G": 100, "B": 200}
    for d, order in enumerate(names):
        expected = [corner[channel] for channel in order]
        assert first_image(federation.train, d)[:, 0, 0].tolist() == expected
        assert first_image(federation.test, d)[:, 0, 0].tolist() == expected


# ---- sound and repeatable


def test_four_hundred_test_examples_for_each_of_twenty_clients_need_eight_thousand():
    source = numbered(6_000, 10_000)
    options = DataOptions(examples=30, test_examples=400, shares="pure", mixture="parity")
    federation = federate(source, options, 20, Key(0))
    assert np.diff(federation.test.start).tolist() == [400] * 20


@pytest.mark.parametrize(
    ("options", "hash"),
    [
        ({}, "a0562f1a16b1c08c"),
        ({"shares": "steps"}, "4193fd90987f3e20"),
        ({"mixture": "rotation+parity"}, "f5b4b70a6d96afb1"),
        ({"mixture": "permutation", "distributions": 3}, "c811c390fd915dea"),
        ({"mixture": "dirichlet"}, "3ee195e6b5c97039"),
    ],
)
def test_partitions_keep_the_hash_that_they_had_before_populations(options, hash):
    assert federated(**options).description["hash"][:16] == hash


def test_default_rotations_and_examples_have_the_same_bits_when_written_out():
    plain, written = federated(), federated(rotations=[0, 90])
    digests = [
        hashlib.sha256(each.train.x.numpy().tobytes() + each.test.y.numpy().tobytes()).hexdigest()
        for each in (plain, written)
    ]
    assert digests[0] == digests[1]
    assert plain.description["clients"] == written.description["clients"]


@pytest.mark.parametrize(
    "options",
    [
        {"shares": "pure", "populations": [6, 2]},
        {"shares": "dirichlet", "rotations": [0, 90, 180]},
        {"mixture": "permutation", "swap": 4},
        {"mixture": "colour", "distributions": 3},
    ],
)
def test_worlds_depend_on_the_seed_alone(options):
    one, again, other = (federated(seed=seed, **options).description for seed in (1, 1, 2))
    assert one == again
    assert one["hash"] != other["hash"]


# ---- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shares": "pure", "populations": [5, 2]},
            "data.populations = [5, 2]: 7 clients in all, and clients = 8; expected numbers that "
            "add up to 8.",
        ),
        (
            {"shares": "pure", "populations": [4, 2, 2]},
            "data.populations = [4, 2, 2]: 3 populations, and data.mixture = 'rotation' has 2 "
            "distributions; expected 2 numbers.",
        ),
        (
            {"populations": [4, 4]},
            "data.populations = [4, 4]: an option of data.shares = 'pure' only, and data.shares = "
            "'uniform'. Leave it out.",
        ),
        (
            {"mixture": "iid", "shares": "pure"},
            "data.shares = 'pure': data.mixture = 'iid' has only one distribution. Leave it out.",
        ),
        (
            {"mixture": "dirichlet", "shares": "dirichlet"},
            "data.shares = 'dirichlet': data.mixture = 'dirichlet' has only one distribution. "
            "Leave it out.",
        ),
        *(
            (
                {"rotations": angles},
                f"data.rotations = {angles}: expected two or more different ones of 0, 90, 180 "
                "and 270.",
            )
            for angles in ([], [0], [0, 0], [0, 45], [0, 360], [0, 90, 90])
        ),
        (
            {"mixture": "parity", "rotations": [0, 180]},
            "data.rotations = [0, 180]: an option of data.mixture = 'rotation' only, and "
            "data.mixture = 'parity'. Leave it out.",
        ),
        (
            {"swap": 4},
            "data.swap = 4: an option of data.mixture = 'permutation' only, and data.mixture = "
            "'rotation'. Leave it out.",
        ),
        (
            {"mixture": "permutation", "swap": 11},
            "data.swap = 11: there are 10 classes; expected 2 to 10.",
        ),
        (
            {"mixture": "permutation", "swap": 3, "distributions": 4},
            "data.distributions = 4: impossible with data.swap = 3; expected 2 to 3.",
        ),
        (
            {"mixture": "colour", "distributions": 7},
            "data.distributions = 7: impossible with data.mixture = 'colour'; expected 2 to 6.",
        ),
        (
            {"rotations": [0, 90, 180], "shares": "steps"},
            "data.shares = 'steps': defined for 2 distributions only, and there are 3; expected "
            "'uniform', 'pure' or 'dirichlet'.",
        ),
    ],
)
def test_federate_rejects_impossible_worlds(options, message):
    with pytest.raises(ConfigError) as caught:
        federated(**options)
    assert str(caught.value) == message


def test_colour_rejects_grey_images():
    options = DataOptions(mixture="colour", examples=5)
    with pytest.raises(DataError) as caught:
        federate(numbered(), options, 4, Key(0))
    assert str(caught.value) == (
        "data.mixture = 'colour': an example of 'numbered' has shape (1, 2, 2); "
        "expected colour images with 3 channels. Others fit 'permutation', 'parity', 'dirichlet', "
        "'shards', 'iid'."
    )
