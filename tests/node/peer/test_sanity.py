"""The bounds on received vectors, by hand."""

import pytest
import torch

from fedspd.node.peer.sanity import find_excess, find_outsized

OWN = torch.tensor([[3.0, 4.0, 0.0]])  # of norm 5


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ([30.0, 40.0, 0.0], None),  # ten times the norm
        ([30.0, 40.1, 0.0], "a model of norm 50.1; expected at most 50"),
        ([3e38, 3e38, 3e38], "a model of norm"),
    ],
)
def test_model_may_have_ten_times_the_norm_of_the_own_one(model, problem):
    found = find_excess(OWN, torch.tensor([model]), has_parameters=True)
    assert found is problem or (found or "").startswith(problem)


def test_parameter_may_be_a_hundred_times_the_largest_own_one():
    """A long vector of small numbers has a norm that allows a single huge one."""
    own = torch.full((1, 40_000), 0.5)  # of norm 100
    model = torch.zeros_like(own)
    model[0, 7] = 100.0  # own ones below 1 count as 1
    assert find_excess(own, model, has_parameters=True) is None
    model[0, 7] = 101.0
    found = find_excess(own, model, has_parameters=True)
    assert found is not None
    assert found.startswith("a parameter of 101; expected at most 100")


def test_no_parameter_may_be_huge_even_beside_huge_own_ones():
    """A lie of less than ten times the own norm, repeated in every round, has no other end."""
    own_KP = torch.tensor([[1e9, 0.0]])
    found = find_excess(own_KP, torch.tensor([[3.4e7, 0.0]]), has_parameters=True)
    assert found == "a parameter of 3.4e+07; expected at most 3.36e+07."
    assert find_excess(own_KP, torch.tensor([[3.3e7, 0.0]]), has_parameters=True) is None


def test_numbers_of_a_search_may_be_as_large_as_a_checksum():
    assert find_excess(OWN, torch.tensor([[2.0**25]]), has_parameters=False) is None
    found = find_excess(OWN, torch.tensor([[2.0**25 * 1.01]]), has_parameters=False)
    assert found is not None
    assert found.startswith("a number of 3.39e+07")
    assert find_excess(OWN * 1e6, torch.tensor([[3.9e8]]), has_parameters=False) is None


def test_offer_without_models_is_within_bounds():
    assert find_excess(OWN, torch.zeros(0, 3), has_parameters=True) is None


def test_first_model_may_have_ten_times_the_norm_of_most():
    five, fifty, more = torch.tensor([[3.0, 4.0]]), torch.tensor([[50.0]]), torch.tensor([[50.1]])
    assert find_outsized([five, fifty, five]) == [False, False, False]
    assert find_outsized([more, five, five]) == [True, False, False]
    assert find_outsized([more, five]) == [True, False]  # of two, the shorter one counts
    assert find_outsized([more]) == [False]
    assert find_outsized([]) == []
