"""A user's own method, which a config names as module:Class, with its options in [options]."""

import asyncio
import importlib
from pathlib import Path

import pytest

import fedspd
from fedspd.config import as_dict, as_toml, changes, load, method_options, validate
from fedspd.core.errors import ConfigError, MethodError, UnreachableError
from fedspd.testing import MemoryNetwork, Subject, run_peers
from fedspd.testing.subject import path_graph

DITTO = {"method": "own_method:Ditto"}
TINY = {
    "clients": 3,
    "rounds": 2,
    "topology": {"kind": "ring"},
    "data": {"examples": 12, "test_examples": 4},
    "training": {"epochs": 1},
}
MODULE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated
from pydantic import Field
from fedspd.algorithms.fedavg import FedAvg
from fedspd.methods import Algorithm, Exchange

class Plain:
    begin = round = predict = print

class Undecorated(Algorithm):
    clusters: int = 1
    begin = round = predict = print

@dataclass(frozen=True)
class Stranger:
    clusters: int = 1
    begin = round = predict = print

@dataclass(frozen=True)
class Lazy(Algorithm):
    clusters: int = 1
    begin = print
    predict = 3

@dataclass(frozen=True)
class Narrow(Algorithm):
    clusters: int = 1
    begin = predict = print

    def round(self, learner, state):
        yield

    def observe(self):
        pass

@dataclass(frozen=True)
class Unclustered(Algorithm):
    begin = round = predict = print

@dataclass(frozen=True)
class Whole(Algorithm):
    mu: float
    clusters: int = 1
    lambda_: Annotated[float, Field(gt=0, alias="lambda")] = 0.5
    limit: int | None = None
    begin = round = predict = print

@dataclass(frozen=True)
class Strange(Algorithm):
    clusters: int = 1
    what: Nowhere = 1
    begin = round = predict = print

def function():
    pass

# ---- FedAvg with one wrong return value each

@dataclass(frozen=True)
class NoState(FedAvg):
    def begin(self, learner, data, key):
        return {"model_CP": super().begin(learner, data, key).model_CP}

@dataclass(frozen=True)
class NoGenerator(FedAvg):
    def round(self, learner, state, data, key):
        return state

@dataclass(frozen=True)
class NoExchange(FedAvg):
    def round(self, learner, state, data, key):
        yield state.model_CP
        return state

@dataclass(frozen=True)
class NoEnd(FedAvg):
    def round(self, learner, state, data, key):
        yield from super().round(learner, state, data, key)

@dataclass(frozen=True)
class NoPrediction(FedAvg):
    def predict(self, learner, state, x):
        return super().predict(learner, state, x)[:-1]

@dataclass(frozen=True)
class NoObservation(FedAvg):
    def observe(self, state):
        return state
"""


@pytest.fixture(autouse=True)
def modules_in_the_current_folder(tmp_path, monkeypatch):
    example = Path(__file__).parents[2] / "examples" / "own_method.py"
    (tmp_path / "own_method.py").write_text(example.read_text("utf-8"), "utf-8")
    (tmp_path / "others.py").write_text(MODULE, "utf-8")
    monkeypatch.chdir(tmp_path)


def refusal(tree) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(tree)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            {"method": "own_method:Dito"},
            "method = 'own_method:Dito': the module 'own_method' has no public function or class "
            "'Dito'; ",
        ),
        (
            {"method": "nowhere_at_all:X"},
            "method = 'nowhere_at_all:X': the import failed with ModuleNotFoundError: ",
        ),
        (
            {"method": "/home/me/own_method.py:Ditto"},
            "method = '/home/me/own_method.py:Ditto': a path; expected the name of a module, such "
            "as 'own_method:NAME'. Run in its folder, ",
        ),
        (DITTO | {"options": {"pul": 1.0}}, "options.pul: unknown key; did you mean 'pull'?"),
        (DITTO | {"options": {"clusters": 3}}, "options.clusters: unknown key; "),
        (DITTO | {"options": {"pull": "much"}}, 'options.pull = "much": expected a number.'),
        ({"method": "others:Whole"}, "options.mu: no value and no default; expected a value."),
        (
            {"method": "others:Whole", "options": {"mu": 1, "lambda": 0}},
            "options.lambda = 0: expected a number greater than 0.",
        ),
        (
            {"method": "others:Lazy"},
            "method = 'others:Lazy': a step is missing or takes other parameters; expected "
            "round(self, learner, state, data, key), predict(self, learner, state, x).",
        ),
        (
            {"method": "others:Narrow"},
            "method = 'others:Narrow': a step is missing or takes other parameters; expected "
            "round(self, learner, state, data, key), observe(self, state).",
        ),
        (
            {"method": "others:Whole", "options": {"mu": 1}, "holdout_clients": 1},
            "method = 'others:Whole': a step is missing or takes other parameters; expected "
            "share(self, state), join(self, learner, data, neighbourhood, key).",
        ),
        (
            {"method": "others:Strange"},
            "method = 'others:Strange': the types of its fields cannot be read: ",
        ),
        *(
            (
                {"method": f"others:{name}"},
                f"method = 'others:{name}': not a method; expected a frozen dataclass derived from "
                "fedspd.methods.Algorithm, with 'clusters: int' among its fields.",
            )
            for name in ("Plain", "Undecorated", "Stranger", "Unclustered", "function")
        ),
    ],
)
def test_config_refuses_a_wrong_method_or_option(tree, sentence):
    assert refusal(tree).startswith(sentence)


def test_options_are_the_fields_of_the_class():
    config = validate({"method": "others:Whole", "options": {"mu": 2.0}})
    assert as_dict(config)["options"] == {"mu": 2.0, "lambda": 0.5}  # the defaults are recorded too
    assert method_options(config) == {"mu": 2.0, "lambda_": 0.5, "limit": None}


def test_config_with_an_own_method_survives_as_text(tmp_path):
    config = validate(DITTO | {"options": {"pull": 0.25}})
    (tmp_path / "config.toml").write_text(as_toml(config), "utf-8")
    assert load(tmp_path / "config.toml") == config
    assert load(overrides=["method=own_method:Ditto", "options.pull=0.25"]) == config
    assert changes(validate(DITTO), config) == {"options.pull": (0.1, 0.25)}


def test_options_table_does_not_matter_to_other_methods():
    assert changes(validate({}), validate({"options": {"pull": 0.25}})) == {}


def test_run_of_an_own_method_counts_models_resumes_and_exports(tmp_path):
    result = fedspd.run({**TINY, **DITTO, "holdout_clients": 1}, out=tmp_path / "run")
    assert result.summary["method"] == "own_method:Ditto"
    assert result.summary["models_sent"] == 2 * 3 * 2  # rounds, clients, neighbours on a ring
    x = result.experiment.plan.test.x[0]
    assert result.model(0)(x).tolist() == result.predict(0, x).tolist()
    again = fedspd.run(out=tmp_path / "run", resume=True)
    assert again.summary["hash"] == result.summary["hash"]


def test_option_changes_the_result():
    near, free = (
        fedspd.run({**TINY, **DITTO, "options": {"pull": pull}}).summary["hash"]
        for pull in (5.0, 0.0)
    )
    assert near != free


def test_ditto_without_pull_equals_local_only_training():
    """One batch holds all examples and nothing is dropped, so the order of examples is nothing."""
    config = {**TINY, "dtype": "float64"}
    ditto, local = (
        fedspd.run({**config, **DITTO, "options": {"pull": 0.0}}),
        fedspd.run({**config, "method": "local"}),
    )
    x = ditto.experiment.plan.test.x[1]
    assert ditto.predict(1, x).flatten().tolist() == pytest.approx(
        local.predict(1, x).flatten().tolist()
    )


WRONG = {
    "NoState": "NoState.begin returned a value of type dict; expected a dataclass of tensors.",
    "NoGenerator": "NoGenerator.round returned a value of type State; expected a generator; ",
    "NoExchange": "NoExchange.round yielded a tensor of shape ",
    "NoEnd": "NoEnd.round returned None; expected a dataclass of tensors.",
    "NoPrediction": "NoPrediction.predict returned [",
    "NoObservation": "NoObservation.observe returned a value of type State; expected an Obs",
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", WRONG)
def test_simulator_refuses_a_wrong_return_value_in_a_sentence(name, workers):
    with pytest.raises(MethodError) as caught:
        fedspd.run({**TINY, "method": f"others:{name}"}, workers=workers)
    assert str(caught.value).startswith(WRONG[name])


@pytest.mark.parametrize("name", WRONG)
def test_peer_refuses_a_wrong_return_value_in_a_sentence(name, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    method = getattr(importlib.import_module("others"), name)
    with pytest.raises(MethodError) as caught:
        run_peers(Subject(method).plan(), path_graph(), 2)
    assert str(caught.value).startswith(WRONG[name])


def test_peers_of_an_own_method_agree_over_a_network_that_delays_and_loses_messages(monkeypatch):
    """Every second announcement is lost and repeated, so nothing is missing in the end."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    method = importlib.import_module("own_method").Ditto
    plan, announcements = Subject(method).plan(), 0

    async def conditions(sender, receiver, rpc_method):
        nonlocal announcements
        if rpc_method == "Fetch":
            await asyncio.sleep(0.01)
        if rpc_method == "Announce":
            announcements += 1
            if announcements % 2:
                raise UnreachableError("lost")

    ideal = run_peers(plan, path_graph(), 2)
    assert run_peers(plan, path_graph(), 2, MemoryNetwork(conditions)) == ideal
    assert announcements > 8
