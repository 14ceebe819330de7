"""Train on windows of sensor values: three axes of acceleration, sixteen moments each.

Each device measures with another offset and sensitivity. Run it with: python own_sensors.py
"""

import numpy as np
from torch import nn

import fedspd

MOVES = {"walking": 2.0, "running": 4.0, "resting": 0.0}  # periods in a window


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return convolutions over time for windows of shape (axes, moments)."""
    axes, moments = shape
    return nn.Sequential(
        nn.Conv1d(axes, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(8 * (moments // 2), classes),
    )


def record(random: np.random.Generator, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return windows [n, axes, moments] and the moves that they show."""
    moves = random.choice(list(MOVES), windows)
    frequency = np.array([MOVES[move] for move in moves])[:, None, None]
    time, phase = np.linspace(0, 1, 16), random.uniform(0, 6.28, (windows, 3, 1))
    noise = 0.3 * random.normal(size=(windows, 3, 16))
    waves = np.sin(6.28 * frequency * time + phase) * (frequency > 0) + noise
    offset, sensitivity = random.normal(0, 20, (3, 1)), random.uniform(1, 50)
    return offset + sensitivity * waves, moves


random = np.random.default_rng(0)
devices = {f"watch {number}": record(random, 80) for number in range(6)}

config = {"method": "fedavg", "rounds": 15, "training": {"batch": 10}}
for scale in ("none", "standard"):  # by the device's own training windows
    result = fedspd.run({**config, "data": {"scale": scale}}, data=devices, model=network)
    print(f"scale {scale}: {result.accuracy.mean():.1%}, mean over 6 devices")
