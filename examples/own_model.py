"""Train your own model: any function (shape, classes) -> nn.Module. Here a CNN for 8 x 8 digits.

Run it with: python own_model.py
"""

from torch import nn

import fedspd


def small_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model for examples of this shape; every client trains its own copy."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 2) * (width // 2), classes),
    )


config = {
    "clients": 8,
    "rounds": 10,
    "training": {"lr": 0.1, "batch": 20},
}
result = fedspd.run(config, model=small_cnn)
print(f"Test accuracy, mean over {len(result.accuracy)} clients: {result.accuracy.mean():.1%}")
print(f"The model of client 0 is an ordinary module again:\n{result.model(0)}")
