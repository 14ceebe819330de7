"""Models by name, as the config's `model` table gives them."""

from collections.abc import Callable
from functools import partial

from torch import nn

from fedspd.core.errors import ConfigError, nearest
from fedspd.core.imports import FROM_PYTHON, load_object
from fedspd.models.cnn import CifarCNN, PaperCNN
from fedspd.models.dense import MLP, Linear
from fedspd.models.mobilenet import MobileNetV2
from fedspd.models.options import MODELS, ModelOptions


def build_model(options: ModelOptions, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model for examples of one shape, whose output is [n, classes].

    Without classes, it is a model for regression, whose output is [n]. A name "module:function"
    is a custom factory, called as function(shape, classes).
    """
    name = options.name_for(shape)
    _check_options(options, name)
    if ":" in name:
        return _custom_model(name, shape, classes)
    factories: dict[str, Callable[[tuple[int, ...], int], nn.Sequential]] = {
        "cnn": PaperCNN,
        "cifar-cnn": partial(CifarCNN, small=options.small, norm=options.norm),
        "mobilenet-v2": MobileNetV2,
        "mlp": partial(MLP, hidden=options.hidden),
        "linear": Linear,
    }
    if classes:
        return factories[name](shape, classes)
    return factories[name](shape, 1).append(nn.Flatten(0))


def _check_options(options: ModelOptions, name: str) -> None:
    if name.startswith(FROM_PYTHON):
        raise ConfigError(
            f"model.name = '{name}': this model was passed to fedspd.run, and no file has it. "
            "Pass it again, as fedspd.run(..., model=...)."
        )
    if ":" not in name and name not in MODELS:
        raise ConfigError(
            f"model.name = '{name}': unknown model; {nearest(name, MODELS)} "
            "A custom model is 'module:function'."
        )
    users = {"small": ["cifar-cnn"], "norm": ["cifar-cnn"], "hidden": ["mlp"]}
    options.refuse_unused("model.name", name, users)


def _custom_model(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    factory = load_object("model.name", name, ConfigError)
    try:
        model: nn.Module = factory(shape, classes)
    except Exception as error:
        raise ConfigError(
            f"model.name = '{name}': the call with shape {shape} and {classes} classes failed "
            f"with {type(error).__name__}: {error}"
        ) from error
    return model
