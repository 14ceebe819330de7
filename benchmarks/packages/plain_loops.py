"""Two plain torch loops, each over half of the clients; nothing is averaged."""

import time
from contextlib import ExitStack

from workload import CLIENTS, EXAMPLES, ROUNDS, report

from fedspd.bench.rows import Size
from fedspd.bench.training import block, with_plain_loop


def main() -> None:
    ends = []
    with ExitStack() as stack:
        turn = with_plain_loop(block(Size(CLIENTS, EXAMPLES, ROUNDS, ())), 2, stack)
        for _ in range(ROUNDS + 1):
            turn()
            ends.append(time.perf_counter())
    report("two plain loops", "torch", ends)


if __name__ == "__main__":
    main()
