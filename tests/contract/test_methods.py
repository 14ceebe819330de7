"""Every method keeps the contract, and each check names the part that a method breaks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspd.algorithms import METHODS
from fedspd.algorithms.fedavg import FedAvg
from fedspd.algorithms.local import State
from fedspd.core.errors import ConfigError, MethodError
from fedspd.engines.simulator import Simulator
from fedspd.methods import Block, Exchange, Key, Learner, Neighbourhood, Observation, Round
from fedspd.testing import CHECKS, Check, Subject, check_method, checks
from fedspd.testing.subject import ROUNDS, path_graph, run_rounds


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_method_keeps_the_contract(subject: Subject, check: Check) -> None:
    check(subject)


FINAL_VALUES = {
    "final_epochs": 3,
    "final_rate": 0.1,
    "final_decay": 0.5,
    "finetune": 3,
    "interpolate": "cv",
}


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].FINAL_OPTIONS])
def test_rounds_do_not_depend_on_options_of_the_final_phase(name, subjects) -> None:
    subject = subjects[name]
    states = []
    for changes in ({}, {option: FINAL_VALUES[option] for option in METHODS[name].FINAL_OPTIONS}):
        engine = run_rounds(Simulator(subject.plan(**changes)), path_graph(), 1, ROUNDS)
        states.append(engine.digests())
    assert states[0] == states[1]


# ---- FedAvg with one mistake each


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """Its round is not a generator."""

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Any:
        return state


@dataclass(frozen=True)
class Talkative(FedAvg):
    """Blocks with client 0 exchange twice."""

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        for _ in range(1 + (0 in data.clients)):
            state = yield from super().round(learner, state, data, key)
        return state


@dataclass(frozen=True)
class Uneven(FedAvg):
    """Blocks with client 0 offer fewer parameters."""

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        only_C1 = torch.zeros(len(data), 1, dtype=torch.long)
        model_C1P = state.model_CP[:, None, (0 in data.clients) :]
        yield Exchange(only_C1, model_C1P, data.counts_C[:, None], only_C1)
        return state


@dataclass(frozen=True)
class Averaging(FedAvg):
    """It averages over the block instead of the neighbourhood."""

    def finish(self, learner: Learner, state: State, data: Block, key: Key) -> State:
        return replace(state, model_CP=state.model_CP.mean(0).repeat(len(data), 1))


@dataclass(frozen=True)
class Scalar(FedAvg):
    """Its state has a field without a row per client."""

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        return replace(super().begin(learner, data, key), loss_C=torch.tensor(0.0))


@dataclass(frozen=True)
class Mutating(FedAvg):
    """It changes the old state."""

    def finish(self, learner: Learner, state: State, data: Block, key: Key) -> State:
        state.model_CP.mul_(2)
        return replace(state, model_CP=state.model_CP.clone())


@dataclass(frozen=True)
class Careless(FedAvg):
    """It draws from torch's global generator without using the draw."""

    def finish(self, learner: Learner, state: State, data: Block, key: Key) -> State:
        torch.rand(1)
        return state


@dataclass(frozen=True)
class Fixed(FedAvg):
    """It ignores the seed."""

    def begin(self, learner: Learner, data: Block, key: Key) -> State:
        return super().begin(learner, data, Key(0))

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        return (yield from super().round(learner, state, data, Key(0, key.round)))


@dataclass(frozen=True)
class Silent(FedAvg):
    """Its predictions have one column too few."""

    def predict(self, learner: Learner, state: State, x: Sequence[Tensor]) -> list[Tensor]:
        return [output[:, 1:] for output in super().predict(learner, state, x)]


@dataclass(frozen=True)
class Diverging(FedAvg):
    """A field of its state becomes infinite."""

    def finish(self, learner: Learner, state: State, data: Block, key: Key) -> State:
        return replace(state, loss_C=state.loss_C * torch.inf)


@dataclass(frozen=True)
class Boasting(FedAvg):
    """It shows another model than the one that predicts."""

    def observe(self, state: State) -> Observation:
        return Observation(model_CP=state.model_CP * 2)


@dataclass(frozen=True)
class Misshapen(FedAvg):
    """It shows a loss of the wrong shape."""

    def observe(self, state: State) -> Observation:
        return Observation(loss_C=state.loss_C[:, None])


@dataclass(frozen=True)
class Repeating(FedAvg):
    """It offers the same cluster twice."""

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        two_C2 = torch.zeros(len(data), 2, dtype=torch.long)
        weight_C2 = data.counts_C[:, None].expand(-1, 2)
        yield Exchange(two_C2, state.model_CP[:, None].repeat(1, 2, 1), weight_C2, two_C2)
        return state


@dataclass(frozen=True)
class Unknown(FedAvg):
    """It offers a cluster that does not exist."""

    def round(self, learner: Learner, state: State, data: Block, key: Key) -> Round[State]:
        seven_C1 = torch.full((len(data), 1), 7)
        yield Exchange(seven_C1, state.model_CP[:, None], data.counts_C[:, None], seven_C1)
        return state


@dataclass(frozen=True)
class Peeking(FedAvg):
    """Its newcomers average over all clients, neighbours or not."""

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        mean_P = neighbourhood.offers.model_CKP[:, 0].mean(0)
        return State(mean_P.repeat(len(data), 1), torch.zeros(len(data)))


@dataclass(frozen=True)
class Alone(FedAvg):
    """Its newcomers get a state of another type."""

    def join(self, learner: Learner, data: Block, neighbourhood: Neighbourhood, key: Key) -> State:
        state = super().join(learner, data, neighbourhood, key)
        return replace(state, loss_C=state.loss_C.double())


@pytest.mark.parametrize(
    ("method", "check", "sentence"),
    [
        (
            Forgetful,
            checks.check_engines_agree,
            "Forgetful.round returned a value of type State; expected a generator; yield an "
            "Exchange, or write 'yield' below the return.",
        ),
        (
            Talkative,
            checks.check_engines_agree,
            "The method's round makes more exchanges in some blocks of clients",
        ),
        (
            Uneven,
            checks.check_engines_agree,
            "The method's round yields exchanges of different shapes in different blocks",
        ),
        (
            Averaging,
            checks.check_engines_agree,
            "Averaging: the result with workers = 3 differs at clients 0, 1, 2, 3, 4; ",
        ),
        (
            Scalar,
            checks.check_engines_agree,
            "Scalar.begin returned a state whose field 'loss_C' is a tensor of shape ()",
        ),
        (
            Mutating,
            checks.check_steps_are_pure,
            "Mutating: finish changes the old state; expected a new one.",
        ),
        (
            Careless,
            checks.check_randomness_comes_from_the_key,
            "Careless: it draws from a global generator; expected draws from the key",
        ),
        (
            Fixed,
            checks.check_randomness_comes_from_the_key,
            "Fixed: two seeds give the same result; expected draws from the key.",
        ),
        (
            Silent,
            checks.check_predictions_fit,
            "Silent: predict gives torch.float32 of shape (7, 2) with clusters = 1; expected "
            "finite torch.float32 of shape (7, 3).",
        ),
        (
            Diverging,
            checks.check_states_are_finite,
            "Diverging: the field 'loss_C' of its state is not finite with S = 1.",
        ),
        (
            Boasting,
            checks.check_observation_fits,
            "Boasting: the observed model_CP predicts otherwise than predict.",
        ),
        (
            Misshapen,
            checks.check_observation_fits,
            "Misshapen: observe gives another shape of loss_C than (5,).",
        ),
        (
            Repeating,
            checks.check_engines_agree,
            "Repeating.round: cluster_CK has the row [0, 0]; expected no repeat.",
        ),
        (
            Unknown,
            checks.check_engines_agree,
            "Unknown.round: cluster_CK has the row [7]; expected clusters from 0 to 1.",
        ),
        (
            Peeking,
            checks.check_newcomers_join,
            "Peeking: join uses the models of a client that is not a neighbour.",
        ),
        (
            Alone,
            checks.check_newcomers_join,
            "Alone: join gives another 'loss_C' than trained clients have.",
        ),
    ],
)
def test_check_names_the_broken_promise(method: type[FedAvg], check: Check, sentence: str) -> None:
    with pytest.raises(MethodError) as caught:
        check(Subject(method))
    assert str(caught.value).startswith(sentence)


def test_check_method_makes_every_check_with_the_options(monkeypatch) -> None:
    """The checks themselves have tests of their own, so two cheap ones stand for all."""
    made: list[Subject] = []
    cheap = (checks.check_small_networks_work, checks.check_newcomers_join)
    monkeypatch.setattr(checks, "CHECKS", (*cheap, made.append))
    check_method(FedAvg, clusters=1, finetune=1)
    (subject,) = made
    assert subject.algorithm() == FedAvg(clusters=1, finetune=1)
    with pytest.raises(TypeError, match="finetun"):
        check_method(FedAvg, finetun=1)
    with pytest.raises(MethodError, match="Peeking: join uses the models"):
        check_method(Peeking)
    with pytest.raises(ConfigError, match=r"^method = 'object': not a method; expected a frozen d"):
        check_method(object)
    assert set(CHECKS) == {check for name, check in vars(checks).items() if is_check(name)}


def is_check(name: str) -> bool:
    return name.startswith("check_") and name != "check_method"


def test_method_without_share_and_join_is_complete_without_newcomers(subjects) -> None:
    ditto = subjects["ditto"].method

    @dataclass(frozen=True)
    class Closed(ditto):
        from fedspd.methods import Algorithm

        share, join = Algorithm.share, Algorithm.join

    subject = Subject(Closed)
    assert not subject.has_newcomers
    checks.check_newcomers_join(subject)
    checks.check_peers_agree(subject)
    with pytest.raises(ConfigError, match="Closed: the method has no share, so no client can join"):
        Closed().share(None)
