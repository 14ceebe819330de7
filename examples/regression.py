"""A mixture of two regressions: every client has points of the lines y = 2x and y = -x, and nobody is told which is which.
Run it with: python regression.py"""

import numpy as np
from torch import nn

import fedspd


def slope(shape: tuple[int, ...], classes: int) -> nn.Module:
    """One number per model; the output is [n], as the targets are."""
    return nn.Sequential(nn.Linear(1, 1, bias=False), nn.Flatten(0))


random = np.random.default_rng(0)
x = random.uniform(-2, 2, size=(2000, 1))
true_slope = random.choice([2.0, -1.0], size=2000)
y = true_slope * x[:, 0] + 0.1 * random.normal(
    size=2000
)  # floating-point targets: a regression, with squared errors

config = {
    "clients": 10,
    "rounds": 20,
    "data": {"mixture": "iid"},
    "topology": {"degree": 4},
    "training": {"batch": 10},
    "fedspd": {"align_every": 1},  # neighbours agree every round on which line is cluster 0
}
result = fedspd.run(config, data=(x, y), model=slope)

centers = np.array(
    [result.state(client).centers_CSP[0, :, 0] for client in range(10)]
)  # one number per client and cluster
for cluster, slopes in enumerate(centers.T):
    print(
        f"cluster {cluster}: slope {slopes.mean():.2f}, from {slopes.min():.2f} to {slopes.max():.2f} over the clients"
    )
