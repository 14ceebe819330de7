"""Models by name, as the config's `model` table gives them."""

from collections.abc import Callable
from functools import partial

from torch import nn

from fedspd.core.errors import ConfigError, nearest
from fedspd.core.imports import load_object
from fedspd.models.cnn import CifarCNN, PaperCNN
from fedspd.models.dense import MLP, Linear
from fedspd.models.mobilenet import MobileNetV2

MODELS: dict[str, str] = {
    "cnn": "The paper's CNN for MNIST and EMNIST: two convolutions, two dense layers, dropout.",
    "cifar-cnn": "The paper's CNN for CIFAR: four convolutions, three dense layers, BatchNorm, dropout; `small`: a quarter of the widths.",
    "mobilenet-v2": "MobileNetV2 for 32 x 32 images: inverted residuals, 2.2 million parameters.",
    "mlp": "One hidden layer of `hidden` units, for examples of any shape.",
    "linear": "One dense layer, for examples of any shape.",
}
HIDDEN = 64


def build_model(
    name: str, shape: tuple[int, ...], classes: int, *, small: bool = False, hidden: int = HIDDEN
) -> nn.Module:
    """A model for examples of one shape, with output [n, classes]; classes = 0: regression, with output [n].

    A name "module:function" is a user's own factory, called as function(shape, classes).
    """
    _check_options(name, small, hidden)
    if ":" in name:
        return _call(name, shape, classes)
    makers: dict[str, Callable[[tuple[int, ...], int], nn.Sequential]] = {
        "cnn": PaperCNN,
        "cifar-cnn": partial(CifarCNN, small=small),
        "mobilenet-v2": MobileNetV2,
        "mlp": partial(MLP, hidden=hidden),
        "linear": Linear,
    }
    return makers[name](shape, classes) if classes else makers[name](shape, 1).append(nn.Flatten(0))


def _check_options(name: str, small: bool, hidden: int) -> None:
    if ":" not in name and name not in MODELS:
        raise ConfigError(
            f'model.name = "{name}" is no known model; {nearest(name, MODELS)} A factory of your own is "module:function".'
        )
    if small and name != "cifar-cnn":
        raise ConfigError(
            f'model.small = true: only "cifar-cnn" has this option, and model.name = "{name}": leave it out.'
        )
    if hidden != HIDDEN and name != "mlp":
        raise ConfigError(
            f'model.hidden = {hidden}: only "mlp" has this option, and model.name = "{name}": leave it out.'
        )
    if hidden < 1:
        raise ConfigError(f"model.hidden = {hidden}: expected at least 1 hidden unit.")


def _call(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    factory = load_object("model.name", name, ConfigError)
    try:
        model = factory(shape, classes)
    except Exception as error:
        raise ConfigError(
            f'model.name = "{name}": the call with shape {shape} and classes {classes} failed with {type(error).__name__}: {error}'
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f'model.name = "{name}": expected a torch.nn.Module, but the call returned {type(model).__name__}.'
        )
    return model
