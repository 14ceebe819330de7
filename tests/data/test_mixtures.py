"""Mixtures and partitioning.

Every image encodes which example of the source it is and whether it was rotated, so each partition
can be checked completely.
"""

import re
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedspd.core.errors import ConfigError, DataError
from fedspd.core.keys import Key
from fedspd.data.amounts import client_shares
from fedspd.data.federation import ClientExamples, Federation
from fedspd.data.mixtures import MIXTURE_BUILDERS
from fedspd.data.options import MIXTURES, DataOptions
from fedspd.data.partitioning import federate
from fedspd.data.sources import Examples, Source

MARK = 255  # a pixel value that no index has; its position tells whether the image was rotated
DISTRIBUTIONS = {
    "rotation": 2,
    "parity": 2,
    "rotation+parity": 4,
    "permutation": 2,
    "dirichlet": 1,
    "shards": 1,
    "iid": 1,
}


def coded(train: int, test: int, classes: int) -> Source:
    """Return a source whose example i has label i % classes and the 2 x 2 pixels of its code.

    The code is i, whether i is a test example, and a mark.
    """

    def part(count: int, is_test: bool) -> Examples:
        index = np.arange(count)
        pixels = [index % MARK, index // MARK, np.full(count, is_test), np.full(count, MARK)]
        x = np.stack(pixels, axis=1).astype(np.uint8).reshape(count, 1, 2, 2)
        return Examples(x, index % classes)

    return Source("coded", part(train, False), part(test, True), classes)


def zeros(name: str, shape: tuple[int, ...], dtype: type, classes: int) -> Source:
    y = np.zeros(100, np.int64 if classes else np.float64)
    part = Examples(np.zeros((100, *shape), dtype), y)
    return Source(name, part, part, classes)


class Decoded(NamedTuple):
    index: NDArray[np.int64]
    is_test: NDArray[np.bool_]
    is_rotated: NDArray[np.bool_]


def decoded(part: ClientExamples) -> Decoded:
    pixels = np.rint((part.x.numpy()[:, 0] + 1) * 127.5).astype(np.int64)
    is_rotated = pixels[:, 0, 1] == MARK
    upright = np.where(is_rotated[:, None, None], np.rot90(pixels, -1, axes=(-2, -1)), pixels)
    assert (upright[:, 1, 1] == MARK).all()
    return Decoded(upright[:, 0, 0] + MARK * upright[:, 0, 1], upright[:, 1, 0] == 1, is_rotated)


def counts(part: ClientExamples, of: NDArray[np.int64], kinds: int) -> NDArray[np.int64]:
    """Return the number of examples of each kind that every client has."""
    rows = zip(part.start[:-1], part.start[1:], strict=True)
    return np.stack([np.bincount(of[first:last], minlength=kinds) for first, last in rows])


def class_counts(part: ClientExamples) -> NDArray[np.int64]:
    return counts(part, part.y.numpy(), 10)


def both(federation: Federation) -> list[ClientExamples]:
    return [federation.train, federation.test]


class Case(NamedTuple):
    source: Source
    options: DataOptions
    clients: int
    key: Key


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw options and a source with enough examples for them."""
    clients, examples = draw(st.integers(1, 8)), draw(st.integers(4, 24))
    mixture = draw(st.sampled_from(sorted(DISTRIBUTIONS)))
    options = DataOptions(
        mixture=mixture,
        examples=examples,
        shares=draw(st.sampled_from(["uniform", "steps"])),
        imbalance=draw(st.sampled_from([1.0, 2.0, 9.5])),
        alpha=draw(st.sampled_from([1e-3, 0.4, 1e3])) if mixture == "dirichlet" else 0.4,
    )
    train, classes = 4 * clients * (examples + 2), draw(st.integers(2, 7))
    source = coded(train, train // draw(st.integers(1, 4)), classes)
    return Case(source, options, clients, Key(draw(st.integers(0, 2**40))))


# --- every mixture


def test_every_mixture_has_a_description() -> None:
    assert MIXTURES.keys() == MIXTURE_BUILDERS.keys() | {"given"}


@given(cases())
def test_federate_assigns_every_example_once_and_exact_amounts(case: Case) -> None:
    federation = federate(*case)
    for part, is_test in zip(both(federation), (False, True), strict=True):
        found = decoded(part)
        assert len(np.unique(found.index)) == len(found.index)
        assert (found.is_test == is_test).all()
        assert len(part.x) == len(part.y) == len(part.truth) == part.start[-1]
    assert len(federation.train.y) == case.clients * case.options.examples
    assert len(set(np.diff(federation.test.start))) == 1


@given(cases())
def test_truth_is_the_distribution_of_each_example(case: Case) -> None:
    federation, mixture = federate(*case), case.options.mixture
    assert federation.distributions == DISTRIBUTIONS[mixture]
    for part in both(federation):
        found, label = decoded(part), part.y.numpy()
        true_label = found.index % case.source.classes
        expected = {
            "rotation": found.is_rotated,
            "parity": true_label % 2,
            "rotation+parity": 2 * (true_label % 2) + found.is_rotated,
            "permutation": label != true_label,
        }.get(mixture, np.zeros(len(label)))
        assert (part.truth == expected).all()
        assert (label == true_label).all() or mixture == "permutation"
        assert not found.is_rotated.any() or "rotation" in mixture


@given(cases())
def test_federate_keeps_shares_to_within_one_example(case: Case) -> None:
    options = DataOptions(
        mixture="parity",
        examples=case.options.examples,
        shares=case.options.shares,
        imbalance=case.options.imbalance,
    )
    shares = client_shares(options.shares, case.clients, 2, case.key.of("mixture", "shares"))
    for part in both(federate(case.source, options, case.clients, case.key)):
        expected = shares * np.diff(part.start)[:, None]
        assert (np.abs(counts(part, part.truth, 2) - expected) < 1).all()


@given(cases())
@settings(max_examples=30)
def test_partition_follows_from_the_key(case: Case) -> None:
    one, again = federate(*case), federate(*case)
    other = federate(*case._replace(key=Key(case.key.seed + 1)))
    for mine, same in zip(both(one), both(again), strict=True):
        assert torch.equal(mine.x, same.x)
        assert torch.equal(mine.y, same.y)
    assert one.description == again.description
    assert one.description["hash"] != other.description["hash"]


# --- one mixture each


def test_rotation_and_parity_rotates_half_of_the_even_and_half_of_the_odd_labels() -> None:
    options = DataOptions(mixture="rotation+parity", examples=100, test_examples=20, shares="steps")
    federation = federate(coded(2000, 400, 10), options, 5, Key(1))
    by_hand = [[5, 5, 45, 45], [15, 15, 35, 35], [25, 25, 25, 25], [35, 35, 15, 15], [45, 45, 5, 5]]
    assert counts(federation.train, federation.train.truth, 4).tolist() == by_hand
    assert counts(federation.test, federation.test.truth, 4)[0].tolist() == [1, 1, 9, 9]


@given(st.integers(2, 10), st.integers(0, 1000), st.data())
def test_permutations_disagree_on_every_class(classes: int, seed: int, data: st.DataObject) -> None:
    distributions = data.draw(st.integers(2, classes))
    options = DataOptions(mixture="permutation", examples=40, distributions=distributions)
    federation = federate(coded(400, 400, classes), options, 4, Key(seed))
    described = federation.description["distributions"]
    relabel_DK = np.array([each["relabel"] or list(range(classes)) for each in described])
    assert (np.sort(relabel_DK, axis=1) == np.arange(classes)).all()
    assert all(len(set(column)) == distributions for column in relabel_DK.T.tolist())
    true_label = decoded(federation.train).index % classes
    expected = relabel_DK[federation.train.truth, true_label]
    assert (federation.train.y.numpy() == expected).all()


def test_pair_converts_the_second_dataset_to_the_shape_of_the_first() -> None:
    grey = Examples(np.full((50, 1, 2, 2), 102, np.uint8), np.arange(50) % 3)
    colour = Examples(np.zeros((50, 3, 4, 4), np.uint8), np.arange(50) % 5)
    first, second = Source("colour", colour, colour, 5), Source("grey", grey, grey, 3)
    federation = federate(first, DataOptions(mixture="pair", examples=10), 4, Key(0), second)
    train = federation.train
    assert (federation.shape, federation.classes) == ((3, 4, 4), 5)
    expected = np.where(train.truth == 1, 102 / 127.5 - 1, -1)
    assert np.allclose(train.x.mean(dim=(1, 2, 3)), expected, atol=1e-6)
    assert train.y.numpy()[train.truth == 1].max() == 2


def test_pair_allows_a_client_without_one_of_the_datasets() -> None:
    large, small = zeros("large", (1, 4, 4), np.uint8, 2), zeros("small", (1, 2, 2), np.uint8, 2)
    options = DataOptions(mixture="pair", examples=2, test_examples=1)
    tests = [federate(large, options, 1, Key(seed), second=small).test for seed in range(20)]
    assert {tuple(test.x.shape) for test in tests} == {(1, 1, 4, 4)}
    assert {int(test.truth[0]) for test in tests} == {0, 1}


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 0.4, 1e3, 1e300])
def test_dirichlet_assigns_all_examples_in_bounded_time(alpha: float) -> None:
    source = coded(20_000, 2_000, 10)
    start = time.process_time()
    options = DataOptions(mixture="dirichlet", examples=200, alpha=alpha)
    federation = federate(source, options, 100, Key(3))
    assert time.process_time() - start < 3
    assert (np.diff(federation.train.start) == 200).all()
    assert (np.sort(decoded(federation.train).index) == np.arange(20_000)).all()


def test_dirichlet_with_a_smaller_alpha_assigns_fewer_classes() -> None:
    def mean_classes(alpha: float) -> float:
        options = DataOptions(mixture="dirichlet", examples=200, alpha=alpha)
        train = federate(coded(40_000, 4_000, 10), options, 20, Key(3)).train
        return float((class_counts(train) > 0).sum(axis=1).mean())

    assert mean_classes(0.05) < 4
    assert mean_classes(100.0) == 10


@pytest.mark.parametrize(("mixture", "alpha"), [("dirichlet", 0.1), ("shards", 0.4)])
def test_test_examples_follow_the_classes_of_training(mixture: Any, alpha: float) -> None:
    options = DataOptions(mixture=mixture, examples=1000, test_examples=50, alpha=alpha)
    train, test = both(federate(coded(20_000, 4_000, 10), options, 20, Key(5)))
    assert np.abs(class_counts(train) / 1000 - class_counts(test) / 50).max() < 1 / 50


def test_shards_give_a_client_two_classes() -> None:
    options = DataOptions(mixture="shards", examples=100)
    per_client = class_counts(federate(coded(1000, 500, 10), options, 10, Key(0)).train)
    assert set(per_client.ravel()) <= {0, 50, 100}
    assert (per_client.sum(axis=0) == 100).all()


def test_iid_keeps_regression_targets_with_their_examples() -> None:
    x = np.arange(60, dtype=np.float64).reshape(20, 3)
    part = Examples(x, x[:, 0] / 2)
    options = DataOptions(mixture="iid", examples=5)
    train = federate(Source("line", part, part, 0), options, 4, Key(0)).train
    assert train.y.dtype.is_floating_point
    assert sorted(train.y.tolist()) == sorted(part.y.tolist())
    assert (train.x[:, 0] == 2 * train.y).all()


# --- numbers of examples


@pytest.mark.parametrize(
    ("clients", "train", "expected"), [(20, 1442, 57), (2, 1000, 300), (40, 80, 2)]
)
def test_examples_default_to_80_percent_of_an_even_share(
    clients: int, train: int, expected: int
) -> None:
    federation = federate(coded(train, 200, 2), DataOptions(mixture="iid"), clients, Key(0))
    assert len(federation.train.y) == clients * expected
    assert federation.description["options"]["examples"] == expected


@pytest.mark.parametrize(("available", "expected"), [(30, 3), (15, 1)])
def test_test_examples_default_to_the_parts_proportion_as_far_as_available(
    available: int, expected: int
) -> None:
    # In proportion, 15 test examples for 100 would be 1.5 per client, rounded to 2: 20 in all.
    options = DataOptions(mixture="iid", examples=10)
    test = federate(coded(100, available, 2), options, 10, Key(0)).test
    assert (np.diff(test.start) == expected).all()


def test_federate_names_the_largest_number_of_examples_that_fits() -> None:
    def train_size(examples: int) -> int:
        options = DataOptions(mixture="parity", examples=examples, test_examples=10)
        return len(federate(coded(1000, 1000, 5), options, 6, Key(2)).train.y)

    problem = r"data.examples = 160: all clients together need [0-9]+ 'odd' examples, and there are"
    with pytest.raises(ConfigError, match=f"{problem} 400; expected at most") as caught:
        train_size(160)
    fitting = int(re.findall(r"expected at most (\d+)", str(caught.value))[0])
    assert train_size(fitting) == 6 * fitting
    with pytest.raises(ConfigError):
        train_size(fitting + 1)


# --- errors


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        (101, {}, "clients + holdout_clients = 101: 'coded' has only 100 training examples"),
        (
            4,
            {"examples": 26},
            "data.examples = 26: all clients together need 104 'coded' examples, and there are "
            "100; expected at most 25.",
        ),
        (
            4,
            {"test_examples": 6},
            "data.test_examples = 6: all clients together need 24 'coded' examples, and there are "
            "20; expected at most 5.",
        ),
        (
            60,
            {"examples": 2},
            "data.examples = 2: all clients together need 120 'coded' examples, and there are "
            "100; even the smallest possible number does not fit. Lower clients.",
        ),
        (
            4,
            {"mixture": "dirichlet", "examples": 26},
            "data.examples = 26: all clients together need 104 'labelled' examples, and there are "
            "100; expected at most 25.",
        ),
        (
            4,
            {"mixture": "shards", "examples": 26},
            "data.examples = 26: all clients together need 104 'labelled' examples, and there are "
            "100; expected at most 25.",
        ),
        (
            4,
            {"mixture": "shards", "shards": 6},
            "data.shards = 6: more than the 5 training examples of the smallest client",
        ),
        (4, {"mixture": "pair"}, "data.mixture = 'pair': data.second is missing"),
        (
            4,
            {"mixture": "permutation", "distributions": 5},
            "data.distributions = 5: impossible with data.mixture = 'permutation' and 4 classes; "
            "expected 2 to 4.",
        ),
        (
            4,
            {"mixture": "permutation", "distributions": 3, "shares": "steps"},
            "data.shares = 'steps': defined for 2 distributions only, and there are 3; expected "
            "'uniform', 'pure' or 'dirichlet'.",
        ),
        (
            4,
            {"distributions": 3},
            "data.distributions = 3: an option of data.mixture = 'permutation' or 'colour' only, "
            "and data.mixture = 'rotation'. Leave it out.",
        ),
        (4, {"alpha": 0.1}, "data.alpha = 0.1: an option of data.mixture = 'dirichlet' only"),
        (
            4,
            {"shards": 3, "mixture": "iid"},
            "data.shards = 3: an option of data.mixture = 'shards' only, and "
            "data.mixture = 'iid'. Leave it out.",
        ),
    ],
)
def test_federate_rejects_impossible_options(
    clients: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        federate(coded(100, 20, 4), DataOptions(**{"examples": 5, **options}), clients, Key(0))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("mixture", "source", "message"),
    [
        (
            "rotation",
            zeros("table", (7,), np.float32, 3),
            r"an example of 'table' has shape \(7,\); expected square images",
        ),
        (
            "rotation+parity",
            zeros("wide", (1, 4, 6), np.uint8, 3),
            r"an example of 'wide' has shape \(1, 4, 6\); expected square images",
        ),
        ("parity", zeros("line", (2,), np.float64, 0), "'parity': 'line' is for regression"),
        ("dirichlet", zeros("line", (2,), np.float64, 0), "'dirichlet': 'line' is for regression"),
    ],
)
def test_federate_rejects_a_source_that_does_not_fit_the_mixture(
    mixture: Any, source: Source, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        federate(source, DataOptions(mixture=mixture, examples=5), 4, Key(0))


def test_federate_rejects_a_second_source_that_does_not_fit() -> None:
    grey, colour = zeros("grey", (1, 2, 2), np.uint8, 2), zeros("colour", (3, 2, 2), np.uint8, 2)
    table = zeros("table", (7,), np.float32, 2)
    pair = DataOptions(mixture="pair", examples=5)
    with pytest.raises(DataError, match="'colour': its images have 3 channels; expected 1, since"):
        federate(grey, pair, 4, Key(0), second=colour)
    with pytest.raises(DataError, match="'table' has no images"):
        federate(grey, pair, 4, Key(0), second=table)
    with pytest.raises(ConfigError, match=r"^data\.second = 'colour': an option of .* 'pair' only"):
        federate(grey, DataOptions(mixture="iid", examples=5, second="colour"), 4, Key(0), colour)
