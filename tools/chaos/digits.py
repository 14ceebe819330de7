"""Handwritten digits with noise: enough examples that a point of accuracy is many of them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

TRAIN_IMAGES = 1400  # of 1797: no image has copies in both the training and the test data
NOISE = 0.1
Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]


def write_digits(path: Path) -> None:
    """Write training and test data as .npz."""
    digits, rng = load_digits(), np.random.default_rng(0)
    order = rng.permutation(len(digits.target))
    image, label = (digits.images / 16)[order], digits.target[order]
    x_train, y_train = _noisy_copies(image[:TRAIN_IMAGES], label[:TRAIN_IMAGES], 3, rng)
    x_test, y_test = _noisy_copies(image[TRAIN_IMAGES:], label[TRAIN_IMAGES:], 8, rng)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def _noisy_copies(
    image: NDArray[np.float64], label: NDArray[np.int64], times: int, rng: np.random.Generator
) -> Arrays:
    image, label = np.repeat(image, times, axis=0), np.repeat(label, times)
    noisy = np.clip(image + rng.normal(0, NOISE, image.shape), 0, 1)
    return noisy.astype(np.float32)[:, None], label.astype(np.int64)
