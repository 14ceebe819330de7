"""Processor seconds of a run that keeps freed memory between steps, and of one that does not.

Prints a line per turn: FedSPD, 100 clients with 20 examples of 784 features, ten rounds, one
worker. A run that gives all free memory back after each slice reads its pages again.
"""

import time

import numpy as np

import fedspd
from fedspd.runtime import processes

CLIENTS, EXAMPLES, FEATURES, TURNS = 100, 20, 784, 2
CONFIG = {
    "method": "fedspd",
    "clients": CLIENTS,
    "rounds": 10,
    "data": {"examples": EXAMPLES, "mixture": "permutation"},
    "model": {"name": "mlp"},
}


def main() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2 * CLIENTS * EXAMPLES, FEATURES)).astype(np.float32)
    data = x, rng.integers(0, 10, len(x)), x[:500], rng.integers(0, 10, 500)
    kept = processes.MOST_KEPT_BYTES
    for _ in range(TURNS):
        seconds = []
        for processes.MOST_KEPT_BYTES in (-1, kept):
            start = time.process_time()
            fedspd.run(CONFIG, data=data, workers=1)
            seconds.append(time.process_time() - start)
        given, own = seconds
        print(f"given back {given:.1f} s, kept {own:.1f} s: {given / own:.2f} times", flush=True)


if __name__ == "__main__":
    main()
