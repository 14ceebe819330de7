"""What is measured of a run, by hand and against the direct computation.

Shapes: N clients, S clusters, D true distributions, P parameters of a model.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from fedspd.core.metrics import (
    CenterMoments,
    Spread,
    accuracy_by_group,
    adjusted_rand_index,
    auc,
    macro_f1,
    purity,
    r2,
    relabelling,
    rmse,
    switched_clients,
)


@pytest.mark.parametrize(
    ("table_SD", "share", "match"),
    [
        ([[8, 1], [2, 9]], 17 / 20, [0, 1]),
        ([[1, 8], [9, 2]], 17 / 20, [1, 0]),  # the same clusters under the other labels
        ([[5, 5], [5, 5]], 1 / 2, [0, 1]),
        (
            [[10, 0], [10, 0]],
            1 / 2,
            [0, 1],
        ),  # one distribution split in two: only one half can stand for it
        ([[7, 0], [0, 6], [3, 4]], 13 / 20, [0, 1, -1]),  # more clusters than distributions
        (
            [[9, 1, 0], [0, 2, 8]],
            17 / 20,
            [0, 2],
        ),  # fewer clusters: none stands for the second distribution
        ([[6, 5], [5, 0]], 10 / 16, [1, 0]),  # the best assignment, not the best pair
        ([[4, 3]], 4 / 7, [0]),
    ],
)
def test_purity_and_relabelling_equal_numbers_worked_by_hand(table_SD, share, match):
    assert purity(np.array(table_SD)) == pytest.approx(share)
    assert relabelling(np.array(table_SD)).tolist() == match


def test_purity_of_no_example_is_unknown():
    assert math.isnan(purity(np.zeros((2, 2), np.int64)))


@pytest.mark.parametrize(
    ("table_SD", "index"),
    [
        ([[10, 0], [0, 10]], 1),
        ([[0, 10], [10, 0]], 1),  # the same groups under the other labels
        # Pairs: 28 + 0 + 1 + 36 together, 36 + 55 by cluster, 45 + 45 by distribution, 190 in all.
        ([[8, 1], [2, 9]], (65 - 91 * 90 / 190) / (90.5 - 91 * 90 / 190)),
        # Each distribution split in two: purity says one half.
        ([[5, 0], [5, 0], [0, 5], [0, 5]], (40 - 40 * 90 / 190) / (65 - 40 * 90 / 190)),
        ([[9, 11]], 0),  # one cluster says nothing
        ([[9, 0], [0, 0]], 1),  # there is one group, and one is found
    ],
)
def test_adjusted_rand_index_equals_numbers_worked_by_hand(table_SD, index):
    assert adjusted_rand_index(np.array(table_SD)) == pytest.approx(index)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_adjusted_rand_index_agrees_with_scikit_learn(seed, S, D):
    table_SD = np.random.default_rng(seed).integers(2, 20, (S, D))
    cluster, truth = (np.repeat(each.ravel(), table_SD.ravel()) for each in np.indices((S, D)))
    assert adjusted_rand_index(table_SD) == pytest.approx(adjusted_rand_score(truth, cluster))


def test_adjusted_rand_index_of_fewer_than_two_examples_is_unknown():
    assert math.isnan(adjusted_rand_index(np.zeros((2, 2), np.int64)))
    assert math.isnan(adjusted_rand_index(np.array([[1, 0], [0, 0]])))


def test_accuracy_by_group_is_the_share_of_right_examples():
    accuracy_D = accuracy_by_group(np.array([[1, 3, 0], [4, 1, 0]]))
    assert accuracy_D[:2].tolist() == [0.8, 0.25]
    assert math.isnan(accuracy_D[2])


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_purity_does_not_depend_on_labels(seed, S, D):
    rng = np.random.default_rng(seed)
    table_SD = rng.integers(1, 50, (S, D))
    assert purity(table_SD[rng.permutation(S)][:, rng.permutation(D)]) == pytest.approx(
        purity(table_SD)
    )
    assert purity(table_SD) >= 1 / max(S, D)  # the mean over all relabellings


def test_spread_equals_numbers_worked_by_hand():
    """0, 1, ..., 19: mean 9.5, variance (20^2 - 1) / 12, the worst 10 % are 0 and 1."""
    spread = Spread.of(np.random.default_rng(0).permutation(20).astype(float))
    assert spread == Spread(mean=9.5, std=pytest.approx(math.sqrt(399 / 12)), worst=0.5, lowest=0.0)


def test_worst_tenth_of_few_clients_is_the_worst_one():
    assert Spread.of(np.array([0.9, 0.5, 0.7])) == Spread(
        mean=pytest.approx(0.7), std=pytest.approx(math.sqrt(0.08 / 3)), worst=0.5, lowest=0.5
    )


@pytest.mark.parametrize(
    ("clients", "tenth"), [(1, 1), (10, 1), (11, 2), (15, 2), (25, 3), (30, 3)]
)
def test_worst_tenth_is_rounded_up(clients, tenth):
    assert Spread.of(np.arange(clients, dtype=float)).worst == (tenth - 1) / 2


def test_spread_leaves_out_scores_that_are_not_finite():
    assert Spread.of(np.array([1.0, np.nan, 3.0, np.inf])) == Spread(
        mean=2.0, std=1.0, worst=1.0, lowest=1.0
    )
    assert all(math.isnan(value) for value in vars(Spread.of(np.array([np.nan]))).values())


def test_worst_errors_are_the_highest():
    """Of 1, ..., 20 the worst 10 % are 19 and 20; `lowest` is the worst of all."""
    errors = np.random.default_rng(0).permutation(20) + 1.0
    spread = Spread.of(errors, is_error=True)
    assert spread == Spread(mean=10.5, std=float(errors.std()), worst=19.5, lowest=20.0)


def test_consensus_distance_equals_numbers_worked_by_hand():
    """Two clients. Cluster 0: 1 and 3, 1 from their mean.

    Cluster 1: (0, 0) and (6, 8) lie 5 from it; squared, 25.
    """
    centers_CSP = np.array([[[1.0, 0.0], [0.0, 0.0]], [[3.0, 0.0], [6.0, 8.0]]])
    assert CenterMoments.of(centers_CSP).consensus_distance().tolist() == [1.0, 25.0]


@given(st.integers(0, 2**32), st.integers(2, 9), st.integers(1, 3), st.integers(1, 5))
def test_consensus_distance_equals_the_direct_computation_in_any_parts(seed, N, S, P):
    rng = np.random.default_rng(seed)
    centers_NSP = rng.normal(size=(N, S, P))
    direct_S = ((centers_NSP - centers_NSP.mean(0)) ** 2).sum(2).mean(0)
    np.testing.assert_allclose(
        CenterMoments.of(centers_NSP).consensus_distance(), direct_S, atol=1e-12
    )
    cut = int(rng.integers(1, N))
    parts = CenterMoments.of(centers_NSP[:cut]) + CenterMoments.of(centers_NSP[cut:])
    assert parts.count == N
    np.testing.assert_allclose(parts.consensus_distance(), direct_S, atol=1e-12)


def test_consensus_distance_of_equal_centers_is_exactly_zero():
    assert CenterMoments.of(np.full((7, 1, 3), 0.1)).consensus_distance() == pytest.approx(
        0.0, abs=1e-15
    )
    assert (CenterMoments.of(np.full((7, 1, 3), 0.1)).consensus_distance() >= 0).all()


def test_switched_clients_are_those_with_other_labels():
    right, switched, confused = [[9, 0], [1, 10]], [[1, 10], [9, 0]], [[5, 5], [5, 5]]
    assert switched_clients(np.array([right, switched, right, confused, right])).tolist() == [1]
    assert switched_clients(np.array([right, right])).tolist() == []
    for count, found in ((2, [1]), (3, [])):  # 90 % and 85 % of 40 examples tell them apart
        other = [[count, 20 - count], [20 - count, count]]
        assert switched_clients(np.array([right, other, right, right, right])).tolist() == found


def test_pure_clients_have_nothing_to_switch():
    """The last client has all its examples in the cluster of the other distribution."""
    right, other, misplaced = [[10, 0], [0, 0]], [[0, 0], [0, 10]], [[0, 0], [10, 0]]
    assert switched_clients(np.array([right, other, right, misplaced])).tolist() == []
    one_cluster = [[0, 0], [9, 1]]  # nine right of ten, as with any single cluster
    assert switched_clients(np.array([right, other, right, one_cluster])).tolist() == []


def test_switched_clients_need_two_clusters_and_distributions():
    assert switched_clients(np.ones((3, 1, 2), np.int64)).tolist() == []
    assert switched_clients(np.ones((3, 2, 1), np.int64)).tolist() == []


# ---- scores of predictions


def test_scores_of_classes_equal_those_of_scikit_learn():
    from sklearn.metrics import f1_score, roc_auc_score

    draw = np.random.default_rng(0)
    output, y = draw.normal(size=(40, 3)).round(1), draw.integers(3, size=40)  # with ties
    chance = np.exp(output) / np.exp(output).sum(1, keepdims=True)
    assert macro_f1(output, y) == pytest.approx(f1_score(y, output.argmax(1), average="macro"))
    expected = roc_auc_score(y, chance, multi_class="ovr", average="macro")
    assert auc(output, y) == pytest.approx(expected)


def test_scores_of_a_regression_equal_those_of_scikit_learn():
    from sklearn.metrics import mean_squared_error, r2_score

    draw = np.random.default_rng(0)
    output, y = draw.normal(size=30), draw.normal(size=30)
    assert rmse(output, y) == pytest.approx(mean_squared_error(y, output) ** 0.5)
    assert r2(output, y) == pytest.approx(r2_score(y, output))
    pair = np.stack([y, 2 * y], 1)
    assert r2(pair, pair) == 1
    assert rmse(pair + 3, pair) == pytest.approx(3)


def test_scores_that_do_not_exist_are_nan():
    output, y = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1, 1])
    assert np.isnan(auc(output, y))
    assert macro_f1(output, y) == pytest.approx((0 + 2 / 3) / 2)
    assert np.isnan(r2(np.array([1.0, 2.0]), np.array([3.0, 3.0])))
