"""Learn a mixture of two regressions: every client has points of the lines y = 2x and y = -x.

No client knows which point belongs to which line. Run it with: python regression.py
"""

import numpy as np
from torch import nn

import fedspd


def slope(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model with one parameter; its output has the shape [n] of the targets."""
    return nn.Sequential(nn.Linear(1, 1, bias=False), nn.Flatten(0))


random = np.random.default_rng(0)
x = random.uniform(-2, 2, size=(2000, 1))
true_slope = random.choice([2.0, -1.0], size=2000)
# Floating-point targets make it a regression, with squared errors.
y = true_slope * x[:, 0] + 0.1 * random.normal(size=2000)

config = {
    "clients": 10,
    "rounds": 20,
    "data": {"mixture": "iid"},
    "topology": {"degree": 4},
    "training": {"batch": 10},
    "method": "fedspd",
    "fedspd": {"align_every": 1},  # neighbours agree every round on which line is cluster 0
}
result = fedspd.run(config, data=(x, y), model=slope)

# One slope per client and cluster.
centers = np.array([result.state(client).centers_CSP[0, :, 0] for client in range(10)])
for cluster, slopes in enumerate(centers.T):
    spread = f"from {slopes.min():.2f} to {slopes.max():.2f} over the clients"
    print(f"cluster {cluster}: slope {slopes.mean():.2f}, {spread}")
