"""Checks that a model can read examples of a shape."""

import math

from fedspd.core.errors import ConfigError


def image_shape(shape: tuple[int, ...], model: str, smallest: int) -> tuple[int, int, int]:
    """Return channels, height and width of an image whose sides are at least `smallest`."""
    if len(shape) != 3 or min(shape) < 1 or min(shape[1:]) < smallest:
        raise ConfigError(
            f"model.name = '{model}': an example has shape {shape}; expected images of shape "
            f"(channels, height, width), each side at least {smallest}. Choose mlp or linear."
        )
    return shape[0], shape[1], shape[2]


def feature_count(shape: tuple[int, ...], model: str) -> int:
    """Return the number of values of an example of any shape."""
    if not shape or min(shape) < 1:
        raise ConfigError(
            f"model.name = '{model}': an example has shape {shape}; expected at least one value "
            "per example."
        )
    return math.prod(shape)
