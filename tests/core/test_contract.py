"""A step that returns something else than its contract says is refused in one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspd.core.algorithm import Algorithm, Observation
from fedspd.core.contract import (
    check_exchange,
    check_observation,
    check_outputs,
    check_round,
    check_state,
)
from fedspd.core.errors import MethodError
from fedspd.core.exchange import Exchange


@dataclass(frozen=True)
class State:
    model_CP: Any


@dataclass(frozen=True)
class Mine(Algorithm[State]):
    clusters: int = 1

    def begin(self, learner: Any, data: Any, key: Any) -> State:
        return State(torch.zeros(3, 2))

    def round(self, learner: Any, state: State, data: Any, key: Any) -> Any:
        yield

    def predict(self, learner: Any, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        return []


def refusal(check: Any, *arguments: Any) -> str:
    with pytest.raises(MethodError) as caught:
        check(Mine(), *arguments)
    return str(caught.value)


def exchange(**changes: Any) -> Exchange:
    tables = {
        "cluster_CK": torch.zeros(3, 2),
        "model_CKP": torch.zeros(3, 2, 7),
        "weight_CK": torch.zeros(3, 2),
        "want_CM": torch.zeros(3, 1),
    }
    return Exchange(**{**tables, **changes})


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (None, "Mine.begin returned None; expected a dataclass of tensors."),
        ({"w": 1}, "Mine.begin returned a value of type dict; expected a dataclass of tensors."),
        (State, "Mine.begin returned a value of type type; expected a dataclass of tensors."),
        (
            State([1.0]),
            "Mine.begin returned a state whose field 'model_CP' is a value of type list; "
            "expected a tensor with one row for each of the 3 clients.",
        ),
        (
            State(torch.zeros(2, 7)),
            "Mine.begin returned a state whose field 'model_CP' is a tensor of shape (2, 7); "
            "expected a tensor with one row for each of the 3 clients.",
        ),
        (
            State(torch.tensor(1.0)),
            "Mine.begin returned a state whose field 'model_CP' is a tensor of shape (); "
            "expected a tensor with one row for each of the 3 clients.",
        ),
    ],
)
def test_state_must_be_a_dataclass_of_tensors_with_a_row_per_client(state, sentence):
    assert refusal(check_state, "begin", state, 3) == sentence


def test_round_must_be_a_generator():
    assert refusal(check_round, State(1)) == (
        "Mine.round returned a value of type State; expected a generator; yield an Exchange, or "
        "write 'yield' below the return."
    )


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (None, "Mine.round yielded None; expected an Exchange."),
        (
            exchange(model_CKP=torch.zeros(3, 7)),
            "Mine.round yielded an Exchange whose model_CKP is a tensor of shape (3, 7); "
            "expected the axes CKP with C = 3.",
        ),
        (
            exchange(weight_CK=torch.zeros(3, 1)),
            "Mine.round yielded an Exchange whose weight_CK is a tensor of shape (3, 1); "
            "expected the axes CK with C = 3, K = 2.",
        ),
        (
            exchange(want_CM=[[0]]),
            "Mine.round yielded an Exchange whose want_CM is a value of type list; "
            "expected the axes CM with C = 3.",
        ),
        (
            exchange(note_C=torch.zeros(4)),
            "Mine.round yielded an Exchange whose note_C is a tensor of shape (4,); "
            "expected the axes C with C = 3.",
        ),
    ],
)
def test_exchange_must_have_a_row_per_client_and_one_k(asked, sentence):
    assert refusal(check_exchange, asked, 3) == sentence


def test_exchange_with_fitting_axes_is_returned():
    asked = exchange(note_C=torch.zeros(3))
    assert check_exchange(Mine(), asked, 3) is asked
    assert refusal(check_exchange, asked, 4).endswith("expected the axes CKP with C = 4.")


def test_predictions_must_have_a_row_per_example():
    x = [torch.zeros(2, 1), torch.zeros(5, 1)]
    assert check_outputs(Mine(), [own * 2 for own in x], x)[1].shape == (5, 1)
    expected = "expected a list of tensors with [2, 5] rows, one tensor per client."
    assert refusal(check_outputs, x[:1], x) == f"Mine.predict returned [2]; {expected}"
    assert refusal(check_outputs, None, x) == f"Mine.predict returned None; {expected}"


def test_observation_is_nothing_by_default_and_of_its_type():
    assert check_observation(Mine(), Mine().observe(State(1))) == Observation()
    assert refusal(check_observation, {"loss_C": 1}) == (
        "Mine.observe returned a value of type dict; expected an Observation."
    )
