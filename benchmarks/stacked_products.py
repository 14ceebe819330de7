"""The products of a stacked step: GFLOP/s, and three ways to compute the product of the last layer.

One thread, 64 hidden units, 10 classes. The shortest of many turns counts, since other programs
only make a turn longer.

Shapes: G clients, B examples of a batch, I features, H hidden units, K classes.
"""

import time
from collections.abc import Callable

import torch

from fedspd.core.stacked_layers import slab

TURNS, H, K = 60, 64, 10
CASES = ((100, 50, 64), (100, 10, 64), (10, 50, 784), (10, 20, 784))  # G, B, I


def main() -> None:
    torch.set_num_threads(1)
    for G, B, features in CASES:
        compare(G, B, features)


def compare(G: int, B: int, features: int) -> None:
    """Print the time and the speed of every product."""
    like, shapes = torch.zeros(G, 1), ((B, features), (H, features), (H, features), (B, H), (B, H))
    x, w, v, h, d = (slab(like, *shape).normal_() for shape in shapes)
    w2, b2 = slab(like, K, H).normal_(), slab(like, 1, K).normal_()
    last, gapless, transposed = slab(like, B, K), x.new_empty(G, B, K), x.new_empty(G, K, B)
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "first layer, forward": (features, lambda: torch.bmm(x, w.mT, out=h)),
        "first layer, gradient": (features, lambda: v.baddbmm_(d.mT, x, beta=0.5)),
        "last layer, with gaps": (K, lambda: torch.baddbmm(b2, h, w2.mT, out=last)),
        "last layer, without gaps": (K, lambda: torch.baddbmm(b2, h, w2.mT, out=gapless)),
        "last layer, transposed": (K, lambda: torch.baddbmm(b2.mT, w2, h.mT, out=transposed)),
    }
    for name, (width, multiply) in ways.items():
        seconds = min(timed(multiply) for _ in range(TURNS))
        speed = 2 * G * B * H * width / seconds / 1e9
        print(f"G={G} B={B} I={features} {name:26} {1e6 * seconds:7.0f} us {speed:6.1f} GFLOP/s")


def timed(multiply: Callable[[], object]) -> float:
    start = time.perf_counter()
    multiply()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
