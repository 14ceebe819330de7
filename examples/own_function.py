"""Your own functions, which own_function.toml names as module:function for data and model.

Run it with: fedspd run own_function.toml
"""

from typing import Any

from numpy.typing import NDArray
from sklearn.datasets import make_moons
from torch import nn


def two_moons() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return points of a plane in two classes; a dataset or four arrays would do as well."""
    x, y = make_moons(n_samples=1500, noise=0.15, random_state=0)
    return x, y


def tanh_net(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a small network for these examples."""
    return nn.Sequential(nn.Linear(shape[0], 16), nn.Tanh(), nn.Linear(16, classes))
