"""What [privacy] refuses, in a sentence."""

import pytest

from fedspd.algorithms.fedavg import FedAvg
from fedspd.config import as_dict, load, validate
from fedspd.core.errors import ConfigError
from fedspd.core.imports import options_table
from fedspd.experiment.build import build_budget, build_experiment, privacy_note

SMALL = {"clients": 3, "rounds": 2, "data": {"examples": 40}, "topology": {"kind": "ring"}}


def refusal(**tree: object) -> str:
    with pytest.raises(ConfigError) as caught:
        build_experiment(validate({**SMALL, **tree}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("privacy", "part"),
    [
        ({"epsilon": 0.0}, "privacy.epsilon = 0.0"),
        ({"epsilon": -1.0}, "privacy.epsilon = -1.0"),
        ({"epsilon": 1.0, "delta": 0.0}, "privacy.delta = 0.0"),
        ({"epsilon": 1.0, "delta": 1.0}, "privacy.delta = 1.0"),
        ({"epsilon": 1.0, "noise": 1.0}, "expected one of them"),
        ({"clip": 2.0}, "expected privacy.epsilon or privacy.noise beside it"),
        ({"noise": 1.0, "rate": 1.5}, "privacy.rate = 1.5"),
        ({"noise": 1.0, "mechanism": "nbafl"}, "follows from privacy.epsilon"),
        ({"epsilon": 1.0, "mechanism": "nbafl", "unit": "client"}, "privacy.unit = 'client'"),
        ({"epsilon": 1e-4}, "too small for even one round, which needs noise above 100 times"),
        ({"noise": 1e300}, "privacy.noise = 1e+300"),
        ({"noise": 1.0, "clip": 1e300}, "privacy.clip = 1e+300"),
        ({"noise": 1.0, "clip": 1e-40}, "privacy.clip = 1e-40"),
        ({"noise": 1.0, "unit": "client", "rate": 0.5}, "privacy.rate = 0.5: has no effect"),
        ({"epsilon": 1.0, "mechanism": "nbafl", "rate": 0.5}, "privacy.rate = 0.5: has no effect"),
    ],
)
def test_privacy_refuses_keys_that_make_no_sense(privacy, part):
    assert part in refusal(privacy=privacy, method="fedavg")


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("fedem", "the mixture pi_i, which weighs every example"),
        ("fedsoft", "the mixture u_i"),
        ("ifca", "the choice of a cluster"),
        ("facade", "the choice of a cluster"),
        ("fedrep", "the halves of the examples"),
        ("pfedme", "the batches"),
    ],
)
def test_method_that_sends_something_unpaid_is_refused_by_its_part(method, part):
    sentence = refusal(method=method, privacy={"noise": 1.0})
    assert f"method = '{method}'" in sentence
    assert part in sentence


class Derived(FedAvg):
    """It inherits that all is paid for, and may send what it likes."""


class Answered(FedAvg):
    EXAMPLES_MEET = None


class Tuned(Answered):
    """It has a final phase that FedAvg's options say nothing of."""

    EXAMPLES_MEET = None

    def finish(self, learner, state, data, key):
        return self.local_update(learner, state, data, key)


def test_derived_method_must_say_itself_whether_all_is_paid_for():
    sentence = refusal(method=f"{__name__}:Derived", privacy={"noise": 1.0})
    assert "its class does not set EXAMPLES_MEET" in sentence
    validate({**SMALL, "method": f"{__name__}:Answered", "privacy": {"noise": 1.0}})


def test_model_with_batchnorm_is_refused_by_its_layer():
    model = {"name": "cifar-cnn", "small": True}
    sentence = refusal(method="fedavg", model=model, privacy={"noise": 1.0})
    assert "layer '1' is a BatchNorm2d" in sentence
    assert "model.norm = 'group'" in sentence
    tree = {**SMALL, "method": "fedavg", "privacy": {"noise": 1.0}}
    plan = build_experiment(validate({**tree, "model": {**model, "norm": "group"}})).plan
    assert not plan.learner.norms


def test_options_that_tell_about_the_examples_are_set_or_refused():
    config = validate({"privacy": {"noise": 1.0}})
    assert config.fedspd.selection == "uniform"
    assert not getattr(config, "fedspd-split").prior
    assert validate({}).fedspd.selection == "mixture"
    assert "expected 'uniform' with privacy" in refusal(
        method="fedspd", fedspd={"selection": "mixture"}, privacy={"noise": 1.0}
    )
    assert "expected False with privacy" in refusal(
        **{"fedspd-split": {"prior": True}}, privacy={"noise": 1.0}
    )


def test_private_config_survives_its_file(tmp_path):
    config = validate({**SMALL, "privacy": {"epsilon": 4.0, "delta": 1e-4}})
    assert validate(as_dict(config)) == config


def test_bfloat16_is_refused_with_privacy():
    assert "not with privacy" in refusal(precision="bf16", privacy={"noise": 1.0})


def test_validation_examples_are_refused_with_privacy():
    assert "data.validation = 0.2" in refusal(
        method="fedavg", data={"examples": 40, "validation": 0.2}, privacy={"noise": 1.0}
    )


def test_scaling_by_the_examples_is_refused_unless_the_whole_client_is_protected():
    tree = {"method": "fedavg", "data": {"scale": "standard"}}
    assert "data.scale = 'standard'" in refusal(**tree, privacy={"noise": 1.0})
    validate({**SMALL, **tree, "privacy": {"noise": 1.0, "unit": "client"}})


@pytest.mark.parametrize(
    ("method", "options", "part"),
    [
        ("fedavg", {"finetune": 0}, "is covered by the budget"),
        ("fedavg", {"finetune": 2}, "without noise"),
        ("fedspd-split", {"final_epochs": 0}, "is covered by the budget"),
        ("fedspd", {"final_epochs": 0}, "shares of its examples"),
        (f"{__name__}:Answered", {"finetune": 0}, "is covered by the budget"),
        (f"{__name__}:Answered", {"finetune": 2}, "without noise"),
        (f"{__name__}:Tuned", {"finetune": 0}, "without noise"),
    ],
)
def test_export_says_whether_the_budget_covers_it(method, options, part):
    own = {options_table(method): options}
    config = validate({**SMALL, "method": method, **own, "privacy": {"noise": 1.0}})
    assert part in privacy_note(config)
    assert "is covered by the budget" not in privacy_note(config, is_silent=True)
    assert privacy_note(validate({**SMALL, "method": method})) is None


@pytest.mark.parametrize(
    ("tree", "part"),
    [
        ({"privacy": {"epsilon": 4.0, "mechanism": "nbafl"}}, "far less than its epsilon says"),
        ({"privacy": {"noise": 1.0, "unit": "client"}, "data": {"scale": "standard"}}, "the mean"),
    ],
)
def test_export_is_not_covered_by_nbafl_nor_with_the_scale_of_the_inputs(tree, part):
    """The file has the mean and the deviation of the client's inputs, as a model needs them."""
    note = privacy_note(validate({**SMALL, "method": "fedavg", **tree}))
    assert "does not cover it" in note
    assert part in note


def test_rate_follows_from_public_numbers_alone():
    tree = {**SMALL, "privacy": {"noise": 1.0}, "training": {"batch": 10}}
    assert build_budget(validate(tree)).mechanism.rate == 0.25
    assert build_budget(validate({**tree, "data": {}})).mechanism.rate == pytest.approx(10 / 300)
    assert build_budget(validate({**tree, "data": {"examples": 4}})).mechanism.rate == 1.0
    own = {**tree, "privacy": {"noise": 1.0, "rate": 0.05}}
    assert build_budget(validate(own)).mechanism.rate == 0.05


def test_noise_follows_from_the_budget():
    tree = {**SMALL, "method": "fedavg", "privacy": {"epsilon": 4.0}}
    budget = build_budget(validate(tree))
    assert 3.99 < budget.epsilon_after(2) <= 4.0
    again = {**tree, "privacy": {"noise": budget.mechanism.noise}}
    assert build_budget(validate(again)).epsilon_after(2) == budget.epsilon_after(2)


def test_large_batch_permits_more_noise():
    """Noise of 100 times the clip is little beside a sum over 10,000 examples."""
    tree = {**SMALL, "method": "fedavg", "rounds": 40, "privacy": {"epsilon": 0.2, "rate": 1.0}}
    with pytest.raises(ConfigError, match="too small for 40 rounds"):
        build_budget(validate(tree))
    large = {**tree, "data": {"examples": 10_000}, "training": {"batch": 10_000, "epochs": 1}}
    assert build_budget(validate(large)).mechanism.noise > 100


def test_config_without_privacy_has_no_budget(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("rounds = 3\n")
    assert build_budget(load(path)) is None
