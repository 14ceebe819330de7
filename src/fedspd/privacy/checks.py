"""Refusals: what cannot be private, in a sentence that says which part."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedspd.core.algorithm import Algorithm, AnyAlgorithm
from fedspd.core.errors import ConfigError
from fedspd.core.learner import Learner
from fedspd.privacy.options import PrivacyOptions


def private_options(
    name: str, method: type[AnyAlgorithm], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that privacy needs of a method's options; refuse others that were given."""
    for option, (value, reason) in method.PRIVATE_OPTIONS.items():
        if option in given and given[option] != value:
            raise ConfigError(
                f"{name}.{option} = {given[option]!r}: {reason}; expected {value!r} with privacy. "
                "Leave it out."
            )
    return {option: needed.value for option, needed in method.PRIVATE_OPTIONS.items()}


def check_private_method(name: str, method: type[AnyAlgorithm]) -> None:
    """Refuse a method that sends something unpaid; a custom one must say itself that it does not.

    A class that is derived from FedAvg may send what FedAvg does not.
    """
    is_answered = ":" not in name or "EXAMPLES_MEET" in vars(method)
    unpaid = method.EXAMPLES_MEET if is_answered else Algorithm.EXAMPLES_MEET
    if unpaid is not None:
        raise ConfigError(
            f"method = '{name}': privacy does not cover {unpaid}; expected a method "
            "that sees each example through its own gradient alone, such as fedspd-split, fedspd, "
            "fedavg, fedper or local. Choose one of them, or leave out [privacy]."
        )


def check_model(learner: Learner, x: Tensor) -> None:
    """Refuse a model in which examples meet, or whose buffers would carry them."""
    batchnorm, instancenorm = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
    for name, layer in learner.module.named_modules():
        if isinstance(layer, batchnorm) or (
            isinstance(layer, instancenorm) and layer.track_running_stats
        ):
            raise ConfigError(
                f"[privacy]: the model's layer '{name}' is a {type(layer).__name__}, in which "
                "examples meet; expected layers that see one example at a time, such as GroupNorm. "
                "With model.name = 'cifar-cnn', set model.norm = 'group'."
            )
    together = learner.outputs(learner.flat, x)
    alone = torch.cat([learner.outputs(learner.flat, one) for one in x[:, None]])
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4):
        raise ConfigError(
            "[privacy]: the model's output for an example depends on the other examples of its "
            "batch; expected a model that sees one example at a time."
        )


def _has_final_phase(method: type[AnyAlgorithm], options: Mapping[str, Any]) -> bool:
    """Return whether `finish` trains; FINAL_OPTIONS say so of the class that they stand in."""
    owner = next(one for one in method.__mro__ if "finish" in vars(one))
    epochs = vars(owner).get("FINAL_OPTIONS", ())[:1]
    return owner is not Algorithm and all(options[option] for option in epochs)


def describe_export(
    method: type[AnyAlgorithm],
    options: Mapping[str, Any],
    privacy: PrivacyOptions,
    *,
    is_scaled: bool,
    is_silent: bool,
) -> str:
    """Return what an exported personal model contains, for a person who may give it away.

    is_scaled   whether the file has the mean and the deviation of the client's inputs
    is_silent   whether the client has trained on beyond its budget, and sent nothing of it
    """
    reason = None
    if _has_final_phase(method, options):
        reason = "the final phase has trained it on its examples without noise"
    elif is_silent:
        reason = "it was trained on after its budget was spent"
    elif not method.HAS_PAID_PERSONAL_MODEL:
        reason = "it is blended by shares of its examples, which no noise covers"
    elif privacy.mechanism == "nbafl":
        reason = "the noise of nbafl promises far less than its epsilon says"
    elif is_scaled:
        reason = "the mean and the deviation of the client's inputs stand beside it"
    if reason is None:
        return (
            "The file has the personal model as it was in the last round: without a final phase, "
            "it is covered by the budget of [privacy]."
        )
    return f"The file has a client's personal model: [privacy] does not cover it, since {reason}."
