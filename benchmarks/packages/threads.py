"""The plain loop on the small model with one torch thread and with two, in turns.

Shows why a package that trains a small model with several threads is slow on a busy machine.
"""

import time

import torch

from fedspd.bench import plain

TURNS, EPOCHS, THREADS = 3, 5, (1, 2)


def main() -> None:
    """Print examples per processor second."""
    speed(1)  # a warm-up
    for _ in range(TURNS):
        print(", ".join(f"{n} threads: {speed(n):,.0f}" for n in THREADS), flush=True)


def speed(threads: int) -> float:
    """Return the examples per processor second of one client."""
    torch.set_num_threads(threads)
    ((x_EF, y_E),) = plain.features(1)
    module, order = plain.build_mlp(), torch.Generator().manual_seed(0)
    start = time.process_time()
    plain.train(module, x_EF, y_E, order, plain.SMALL_BATCH, EPOCHS)
    return EPOCHS * len(y_E) / (time.process_time() - start)


if __name__ == "__main__":
    main()
