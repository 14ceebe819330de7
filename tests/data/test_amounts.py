"""Numbers of examples for every client, compared with numbers computed by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedspd.core.keys import Key
from fedspd.data.amounts import apportion, client_amounts, client_shares, fill


def test_apportion_rounds_by_largest_remainder() -> None:
    weights = np.array([[0.5, 0.3, 0.2], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert apportion(weights, np.array([7, 4, 0])).tolist() == [[4, 2, 1], [2, 1, 1], [0, 0, 0]]


def test_client_amounts_form_three_groups() -> None:
    assert sorted(client_amounts(6, 300, 9.0, Key(0)).tolist()) == [60, 60, 300, 300, 540, 540]
    assert client_amounts(4, 7, 1.0, Key(0)).tolist() == [7, 7, 7, 7]
    assert sorted(client_amounts(2, 50, 4.0, Key(0)).tolist()) == [20, 80]
    # In proportion, the smallest of these would have none.
    assert sorted(client_amounts(3, 3, 100.0, Key(0)).tolist()) == [2, 3, 4]


@given(st.integers(1, 40), st.integers(2, 300), st.floats(1, 50), st.integers(0, 99))
def test_client_amounts_have_the_given_mean_and_ratio(
    clients: int, examples: int, ratio: float, seed: int
) -> None:
    amount = client_amounts(clients, examples, ratio, Key(seed))
    smallest, largest = amount.min(), amount.max()
    assert amount.sum() == clients * examples
    assert smallest >= 2
    if clients > 1 and smallest > 2:
        assert (largest - 1) / (smallest + 1) <= ratio <= (largest + 1) / (smallest - 1)


def test_client_shares_lie_between_10_and_90_percent() -> None:
    two = client_shares("uniform", 1000, 2, Key(0))
    assert 0.1 <= two.min() <= two.max() <= 0.9
    assert np.allclose(client_shares("uniform", 50, 5, Key(0)).sum(axis=1), 1)
    steps = client_shares("steps", 7, 2, Key(0))[:, 0]
    assert np.allclose(steps, [0.1, 0.3, 0.5, 0.7, 0.9, 0.1, 0.3])


def test_fill_splits_a_class_that_runs_out_and_replaces_it_by_preference() -> None:
    preference = np.array([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
    # The clients request 12 examples of class 0, which has 6: each gets 3. The 3 that each still
    # lacks come from the other two classes in the ratio 3 : 1, which is 2.25 and 0.75.
    filled = fill(preference, np.array([10, 10]), np.array([6, 100, 100]))
    assert filled.tolist() == [[3, 5, 2], [3, 5, 2]]


def test_fill_takes_classes_that_no_client_prefers_when_others_run_out() -> None:
    preference = np.array([[1.0, 0.0], [1.0, 0.0]])
    assert fill(preference, np.array([4, 4]), np.array([4, 4])).tolist() == [[2, 2], [2, 2]]


@given(
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(0, 99),
    st.sampled_from([1e-3, 0.1, 1.0]),
    st.booleans(),
)
def test_fill_meets_every_amount_within_the_sizes(
    clients: int, classes: int, seed: int, alpha: float, uses_all: bool
) -> None:
    random = np.random.default_rng(seed)
    amount = random.integers(0, 50, clients)
    spare = 0 if uses_all else 30
    size = random.multinomial(amount.sum() + spare, np.full(classes, 1 / classes))
    count = fill(random.dirichlet(np.full(classes, alpha), clients), amount, size)
    assert (count >= 0).all()
    assert (count.sum(axis=1) == amount).all()
    assert (count.sum(axis=0) <= size).all()
