"""The shape of one example, checked for the model that is to read it."""

import math

from fedspd.core.errors import ConfigError


def image(shape: tuple[int, ...], model: str, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape) < 1 or min(shape[1:]) < smallest:
        raise ConfigError(
            f'model.name = "{model}" reads images of shape (channels, height, width), each side at least {smallest}, '
            f'but an example of this data has shape {shape}: choose "mlp" or "linear", or data made of images.'
        )
    return shape[0], shape[1], shape[2]


def features(shape: tuple[int, ...], model: str) -> int:
    """How many numbers an example of any shape has."""
    if not shape or min(shape) < 1:
        raise ConfigError(
            f'model.name = "{model}" reads examples of at least one number, but an example of this data has shape {shape}: '
            "give every example a non-empty shape such as (64,)."
        )
    return math.prod(shape)
