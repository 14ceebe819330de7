"""Handwritten digits with a little noise, many enough that a point of accuracy is many examples."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

TRAINING = 1400  # of 1797: copies of one digit are never on both sides
NOISE = 0.1
Examples = tuple[NDArray[np.float32], NDArray[np.int64]]


def write(path: Path) -> None:
    found, rng = load_digits(), np.random.default_rng(0)
    order = rng.permutation(len(found.target))
    image, label = (found.images / 16)[order], found.target[order]
    x_train, y_train = _copies(image[:TRAINING], label[:TRAINING], 3, rng)
    x_test, y_test = _copies(image[TRAINING:], label[TRAINING:], 8, rng)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def _copies(
    image: NDArray[np.float64], label: NDArray[np.int64], times: int, rng: np.random.Generator
) -> Examples:
    image, label = np.repeat(image, times, axis=0), np.repeat(label, times)
    return np.clip(image + rng.normal(0, NOISE, image.shape), 0, 1).astype(np.float32)[
        :, None
    ], label.astype(np.int64)
