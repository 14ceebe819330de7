"""Who gets which examples. Every image says which original it is and how it was turned, so that each deal can be checked in full."""

import re
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedspd.core.errors import ConfigError, DataError
from fedspd.core.keys import Key
from fedspd.data.amounts import apportion, client_amounts, client_shares, fill
from fedspd.data.federation import ClientExamples, Federation
from fedspd.data.mixtures import MIXTURES, RECIPES, MixtureOptions, federate
from fedspd.data.sources import Examples, Source

MARK = 255  # a pixel that no index has: where it lies says how the image was turned
DISTRIBUTIONS = {
    "rotation": 2,
    "parity": 2,
    "rotation+parity": 4,
    "permutation": 2,
    "dirichlet": 1,
    "shards": 1,
    "iid": 1,
}


def coded(name: str, train: int, test: int, classes: int) -> Source:
    """Example i has label i % classes; its 2 x 2 pixels hold i, whether it is a test example, and a mark."""

    def part(count: int, is_test: bool) -> Examples:
        index = np.arange(count)
        pixels = [index % MARK, index // MARK, np.full(count, is_test), np.full(count, MARK)]
        return Examples(
            np.stack(pixels, axis=1).astype(np.uint8).reshape(count, 1, 2, 2), index % classes
        )

    return Source(name, part(train, False), part(test, True), classes)


def arrays(name: str, shape: tuple[int, ...], kind: type, classes: int) -> Source:
    part = Examples(
        np.zeros((100, *shape), kind), np.zeros(100, np.int64 if classes else np.float64)
    )
    return Source(name, part, part, classes)


class Decoded(NamedTuple):
    index: NDArray[np.int64]
    is_test: NDArray[np.bool_]
    rotated: NDArray[np.bool_]


def decoded(part: ClientExamples) -> Decoded:
    pixels = np.rint((part.x.numpy()[:, 0] + 1) * 127.5).astype(np.int64)
    rotated = pixels[:, 0, 1] == MARK
    upright = np.where(rotated[:, None, None], np.rot90(pixels, -1, axes=(-2, -1)), pixels)
    assert (upright[:, 1, 1] == MARK).all()
    return Decoded(upright[:, 0, 0] + MARK * upright[:, 0, 1], upright[:, 1, 0] == 1, rotated)


def counts(part: ClientExamples, of: NDArray[np.int64], kinds: int) -> NDArray[np.int64]:
    """How many examples of each kind every client has."""
    return np.stack(
        [
            np.bincount(of[a:b], minlength=kinds)
            for a, b in zip(part.start[:-1], part.start[1:], strict=True)
        ]
    )


def both(federation: Federation) -> list[ClientExamples]:
    return [federation.train, federation.test]


@st.composite
def settings_that_fit(draw: st.DrawFn) -> tuple[Source, MixtureOptions, Key]:
    clients, examples, classes = (
        draw(st.integers(1, 8)),
        draw(st.integers(4, 24)),
        draw(st.integers(2, 7)),
    )
    mixture = draw(st.sampled_from(sorted(DISTRIBUTIONS)))
    options = MixtureOptions(
        mixture=mixture,
        clients=clients,
        examples=examples,
        shares=draw(st.sampled_from(["uniform", "steps"])),
        imbalance=draw(st.sampled_from([1.0, 2.0, 9.5])),
        alpha=draw(st.sampled_from([1e-3, 0.4, 1e3])) if mixture == "dirichlet" else 0.4,
    )
    train = 4 * clients * (examples + 2)
    return (
        coded("coded", train, train // draw(st.integers(1, 4)), classes),
        options,
        Key(draw(st.integers(0, 2**40))),
    )


@given(settings_that_fit())
@settings(max_examples=150, deadline=None)
def test_every_example_is_dealt_once_from_its_own_part_and_the_amounts_are_exact(
    case: tuple[Source, MixtureOptions, Key],
) -> None:
    source, options, key = case
    federation = federate(source, options, key)
    for part, is_test in zip(both(federation), (False, True), strict=True):
        read = decoded(part)
        assert len(np.unique(read.index)) == len(read.index)
        assert (read.is_test == is_test).all()
        assert len(part.x) == len(part.y) == len(part.truth) == part.start[-1]
    amounts = np.diff(federation.train.start)
    assert amounts.sum() == options.clients * options.examples
    assert len(set(np.diff(federation.test.start))) == 1


@given(settings_that_fit())
@settings(max_examples=150, deadline=None)
def test_the_truth_is_what_was_done_to_the_example(
    case: tuple[Source, MixtureOptions, Key],
) -> None:
    source, options, key = case
    federation = federate(source, options, key)
    assert federation.distributions == DISTRIBUTIONS[options.mixture]
    for part in both(federation):
        read, label = decoded(part), part.y.numpy()
        original = read.index % source.classes
        expected = {
            "rotation": read.rotated,
            "parity": original % 2,
            "rotation+parity": 2 * (original % 2) + read.rotated,
            "permutation": label != original,
        }.get(options.mixture, np.zeros(len(label)))
        assert (part.truth == expected).all()
        assert (label == original).all() or options.mixture == "permutation"
        assert not read.rotated.any() or "rotation" in options.mixture


@given(settings_that_fit())
@settings(max_examples=100, deadline=None)
def test_shares_are_kept_to_within_one_example(case: tuple[Source, MixtureOptions, Key]) -> None:
    source, options, key = case
    options = replace(options, mixture="parity", alpha=0.4)
    shares = client_shares(options.shares, options.clients, 2, key.of("mixture", "shares"))
    for part in both(federate(source, options, key)):
        assert (
            np.abs(counts(part, part.truth, 2) - shares * np.diff(part.start)[:, None]) < 1
        ).all()


def test_half_of_the_even_and_half_of_the_odd_are_rotated() -> None:
    options = MixtureOptions(
        "rotation+parity", clients=5, examples=100, test_examples=20, shares="steps"
    )
    federation = federate(coded("coded", 2000, 400, 10), options, Key(1))
    by_hand = [[5, 5, 45, 45], [15, 15, 35, 35], [25, 25, 25, 25], [35, 35, 15, 15], [45, 45, 5, 5]]
    assert counts(federation.train, federation.train.truth, 4).tolist() == by_hand
    assert counts(federation.test, federation.test.truth, 4)[0].tolist() == [1, 1, 9, 9]


@given(st.integers(2, 10), st.integers(0, 1000), st.data())
@settings(max_examples=50, deadline=None)
def test_no_two_permutations_agree_on_any_class(
    classes: int, seed: int, data: st.DataObject
) -> None:
    distributions = data.draw(st.integers(2, classes))
    options = MixtureOptions("permutation", clients=4, examples=40, distributions=distributions)
    federation = federate(coded("coded", 400, 400, classes), options, Key(seed))
    relabelled = [
        each["relabel"] or list(range(classes)) for each in federation.description["distributions"]
    ]
    for one, to in enumerate(relabelled):
        assert sorted(to) == list(range(classes))
        assert all(
            mine != theirs
            for other in relabelled[:one]
            for mine, theirs in zip(to, other, strict=True)
        )
    original = decoded(federation.train).index % classes
    assert (
        federation.train.y.numpy() == np.array(relabelled)[federation.train.truth, original]
    ).all()


def test_a_pair_has_the_second_dataset_in_the_shape_of_the_first() -> None:
    grey = Examples(np.full((50, 1, 2, 2), 102, np.uint8), np.arange(50) % 3)
    colour = Examples(np.zeros((50, 3, 4, 4), np.uint8), np.arange(50) % 5)
    options = MixtureOptions("pair", clients=4, examples=10)
    federation = federate(
        Source("colour", colour, colour, 5), options, Key(0), Source("grey", grey, grey, 3)
    )
    train = federation.train
    assert (federation.shape, federation.classes) == ((3, 4, 4), 5)
    assert np.allclose(
        train.x.mean(dim=(1, 2, 3)), np.where(train.truth == 1, 102 / 127.5 - 1, -1), atol=1e-6
    )
    assert train.y.numpy()[train.truth == 1].max() == 2


def test_a_pair_may_leave_a_part_without_one_of_them() -> None:
    wide, small = arrays("wide", (1, 4, 4), np.uint8, 2), arrays("small", (1, 2, 2), np.uint8, 2)
    options = MixtureOptions("pair", clients=1, examples=2, test_examples=1)
    tests = [federate(wide, options, Key(seed), second=small).test for seed in range(20)]
    assert {tuple(test.x.shape) for test in tests} == {(1, 1, 4, 4)}
    assert {int(test.truth[0]) for test in tests} == {0, 1}


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 0.4, 1e3, 1e300])
def test_dirichlet_deals_out_everything_in_bounded_time(alpha: float) -> None:
    source = coded("coded", 20_000, 2_000, 10)
    began = time.perf_counter()
    federation = federate(
        source, MixtureOptions("dirichlet", clients=100, examples=200, alpha=alpha), Key(3)
    )
    assert time.perf_counter() - began < 3
    assert (np.diff(federation.train.start) == 200).all()
    assert (np.sort(decoded(federation.train).index) == np.arange(20_000)).all()


def test_a_smaller_alpha_leaves_a_client_with_fewer_classes() -> None:
    def classes_held(alpha: float) -> float:
        train = federate(
            coded("coded", 40_000, 4_000, 10),
            MixtureOptions("dirichlet", 20, 200, alpha=alpha),
            Key(3),
        ).train
        return float((counts(train, train.y.numpy(), 10) > 0).sum(axis=1).mean())

    assert classes_held(0.05) < 4
    assert classes_held(100.0) == 10


def test_each_client_is_tested_on_the_classes_it_trains_on_even_if_it_prefers_others() -> None:
    few = MixtureOptions("dirichlet", 20, 1000, test_examples=50, alpha=0.1)
    for options in (few, MixtureOptions("shards", 20, 1000, test_examples=50)):
        federation = federate(coded("coded", 20_000, 4_000, 10), options, Key(5))
        train, test = (
            counts(part, part.y.numpy(), 10) / np.diff(part.start)[:, None]
            for part in both(federation)
        )
        assert np.abs(train - test).max() < 1 / 50


def test_shards_give_a_client_two_classes() -> None:
    train = federate(
        coded("coded", 1000, 500, 10), MixtureOptions("shards", clients=10, examples=100), Key(0)
    ).train
    per_client = counts(train, train.y.numpy(), 10)
    assert set(per_client.ravel()) <= {0, 50, 100}
    assert (per_client.sum(axis=0) == 100).all()


def test_iid_on_a_regression_keeps_the_targets_with_their_examples() -> None:
    x = np.arange(60, dtype=np.float64).reshape(20, 3)
    part = Examples(x, x[:, 0] / 2)
    train = federate(
        Source("line", part, part, 0), MixtureOptions("iid", clients=4, examples=5), Key(0)
    ).train
    assert train.y.dtype.is_floating_point
    assert sorted(train.y.tolist()) == sorted(part.y.tolist())
    assert (train.x[:, 0] == 2 * train.y).all()


@given(settings_that_fit())
@settings(max_examples=30, deadline=None)
def test_the_key_decides_everything(case: tuple[Source, MixtureOptions, Key]) -> None:
    source, options, key = case
    one, again, other = (federate(source, options, k) for k in (key, key, Key(key.seed + 1)))
    for mine, same in zip(both(one), both(again), strict=True):
        assert torch.equal(mine.x, same.x)
        assert torch.equal(mine.y, same.y)
    assert one.description == again.description
    assert one.description["hash"] != other.description["hash"]


def test_largest_remainders_by_hand() -> None:
    weights = np.array([[0.5, 0.3, 0.2], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert apportion(weights, np.array([7, 4, 0])).tolist() == [[4, 2, 1], [2, 1, 1], [0, 0, 0]]


def test_a_class_that_runs_out_is_split_and_replaced_by_preference() -> None:
    preference = np.array([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
    # Class 0: 12 are asked for and 6 there, 3 each. The 3 that each lacks come 3 : 1 from the others: 2.25 and 0.75.
    assert fill(preference, np.array([10, 10]), np.array([6, 100, 100])).tolist() == [
        [3, 5, 2],
        [3, 5, 2],
    ]
    # Nobody likes class 1, but class 0 has only 4 for the two.
    assert fill(
        np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([4, 4]), np.array([4, 4])
    ).tolist() == [[2, 2], [2, 2]]


@given(
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(0, 99),
    st.sampled_from([1e-3, 0.1, 1.0]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_fill_is_exact_and_never_overdraws(
    clients: int, kinds: int, seed: int, alpha: float, all_of_it: bool
) -> None:
    random = np.random.default_rng(seed)
    amount = random.integers(0, 50, clients)
    spare = 0 if all_of_it else 30
    size = random.multinomial(amount.sum() + spare, np.full(kinds, 1 / kinds))
    count = fill(random.dirichlet(np.full(kinds, alpha), clients), amount, size)
    assert (count >= 0).all()
    assert (count.sum(axis=1) == amount).all()
    assert (count.sum(axis=0) <= size).all()


def test_amounts_in_three_groups_by_hand() -> None:
    assert sorted(client_amounts(6, 300, 9.0, Key(0)).tolist()) == [60, 60, 300, 300, 540, 540]
    assert client_amounts(4, 7, 1.0, Key(0)).tolist() == [7, 7, 7, 7]
    assert sorted(client_amounts(2, 50, 4.0, Key(0)).tolist()) == [20, 80]
    assert sorted(client_amounts(3, 3, 100.0, Key(0)).tolist()) == [
        2,
        3,
        4,
    ]  # the smallest would have had none


@given(st.integers(1, 40), st.integers(2, 300), st.floats(1, 50), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_amounts_have_the_right_mean_and_ratio(
    clients: int, examples: int, ratio: float, seed: int
) -> None:
    amount = client_amounts(clients, examples, ratio, Key(seed))
    assert amount.sum() == clients * examples
    assert amount.min() >= 2
    if clients > 1 and amount.min() > 2:
        assert (
            (amount.max() - 1) / (amount.min() + 1)
            <= ratio
            <= (amount.max() + 1) / (amount.min() - 1)
        )


def test_shares_stay_between_a_tenth_and_nine_tenths() -> None:
    two = client_shares("uniform", 1000, 2, Key(0))
    assert 0.1 <= two.min() <= two.max() <= 0.9
    assert np.allclose(client_shares("uniform", 50, 5, Key(0)).sum(axis=1), 1)
    assert np.allclose(
        client_shares("steps", 7, 2, Key(0))[:, 0], [0.1, 0.3, 0.5, 0.7, 0.9, 0.1, 0.3]
    )


def test_test_examples_follow_the_parts_sizes_as_far_as_there_are_any() -> None:
    def tested(test: int) -> int:
        return int(
            np.diff(
                federate(
                    coded("coded", 100, test, 2), MixtureOptions("iid", 10, 10), Key(0)
                ).test.start
            )[0]
        )

    assert (tested(30), tested(15)) == (3, 1)  # 1.5 rounds to 2, and 20 are not there


def test_too_many_examples_are_refused_with_the_largest_number_that_fits() -> None:
    source, options = (
        coded("coded", 1000, 1000, 5),
        MixtureOptions("parity", clients=6, examples=160, test_examples=10),
    )
    with pytest.raises(
        ConfigError, match=r"data.examples = 160 asks for [0-9]+ 'odd' examples .* there are 400"
    ) as refusal:
        federate(source, options, Key(2))
    fitting = int(re.findall(r"lower data.examples to (\d+)", str(refusal.value))[0])
    assert len(federate(source, replace(options, examples=fitting), Key(2)).train.y) == 6 * fitting
    with pytest.raises(ConfigError):
        federate(source, replace(options, examples=fitting + 1), Key(2))


GOOD = MixtureOptions("rotation", clients=4, examples=5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mixture": "rotatoin"}, "data.mixture = 'rotatoin' is unknown: did you mean 'rotation'?"),
        ({"shares": "step"}, "data.shares = 'step' is unknown: did you mean 'steps'?"),
        ({"clients": 0}, "data.clients = 0 is impossible: expected 1 or more."),
        (
            {"clients": 101},
            "There are 101 clients, those of holdout_clients included, and only 100 training examples",
        ),
        ({"examples": 1}, "data.examples = 1 is impossible: expected 2 or more."),
        (
            {"examples": 26},
            "'coded' examples for all clients together, and there are 100: lower data.examples to 25.",
        ),
        ({"test_examples": 0}, "data.test_examples = 0 is impossible"),
        ({"test_examples": 6}, "data.test_examples = 6 asks for 24 'coded' examples"),
        (
            {"clients": 60, "examples": 2},
            "not even the least possible number fits, so lower clients.",
        ),
        ({"mixture": "dirichlet", "examples": 26}, "and there are 100: lower data.examples to 25."),
        ({"mixture": "shards", "examples": 26}, "and there are 100: lower data.examples to 25."),
        (
            {"mixture": "shards", "shards": 6},
            "data.shards = 6 is more than the 5 training examples of the smallest client.",
        ),
        ({"mixture": "pair"}, "data.mixture = 'pair' needs a second dataset"),
        (
            {"mixture": "permutation", "distributions": 5},
            "data.distributions = 5 does not fit .* expected 2 to 4, the classes.",
        ),
        (
            {"mixture": "permutation", "distributions": 3, "shares": "steps"},
            "data.shares = 'steps' is defined for 2 distributions",
        ),
        ({"distributions": 3}, "data.distributions = 3 is for data.mixture = 'permutation' only"),
        (
            {"alpha": 0.1},
            "data.alpha = 0.1 is for data.mixture = 'dirichlet' only, and it is 'rotation': leave it out.",
        ),
        (
            {"shards": 3, "mixture": "iid"},
            "data.shards = 3 is for data.mixture = 'shards' only, and it is 'iid': leave it out.",
        ),
        ({"alpha": 0.0}, "data.alpha = 0.0 is impossible"),
        ({"alpha": float("nan")}, "data.alpha = nan is impossible"),
        ({"imbalance": 0.5}, "data.imbalance = 0.5 is impossible: expected 1 or more."),
    ],
)
def test_impossible_options_are_refused_in_one_sentence(
    change: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        federate(coded("coded", 100, 20, 4), replace(GOOD, **change), Key(0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mixture", "source", "sentence"),
    [
        (
            "rotation",
            arrays("table", (7,), np.float32, 3),
            r"needs square images, and an example of 'table' has the shape \(7,\)",
        ),
        (
            "rotation+parity",
            arrays("wide", (1, 4, 6), np.uint8, 3),
            r"needs square images, and an example of 'wide' has the shape \(1, 4, 6\)",
        ),
        (
            "parity",
            arrays("line", (2,), np.float64, 0),
            "'parity' needs class labels, and 'line' is a regression",
        ),
        ("dirichlet", arrays("line", (2,), np.float64, 0), "'dirichlet' needs class labels"),
    ],
)
def test_a_source_that_does_not_fit_the_mixture_is_refused(
    mixture: str, source: Source, sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        federate(source, replace(GOOD, mixture=mixture), Key(0))


def test_a_second_source_that_does_not_fit_is_refused() -> None:
    grey, colour = arrays("grey", (1, 2, 2), np.uint8, 2), arrays("colour", (3, 2, 2), np.uint8, 2)
    with pytest.raises(DataError, match="a second dataset of 1 or 1 channels, and 'colour' has 3"):
        federate(grey, replace(GOOD, mixture="pair"), Key(0), second=colour)
    with pytest.raises(DataError, match="and 'table' has none"):
        federate(
            grey, replace(GOOD, mixture="pair"), Key(0), second=arrays("table", (7,), np.float32, 2)
        )
    with pytest.raises(
        ConfigError, match=r"data.second = 'colour' is for data.mixture = 'pair' only"
    ):
        federate(grey, GOOD, Key(0), second=colour)


def test_every_mixture_is_described() -> None:
    assert MIXTURES.keys() == RECIPES.keys()
