"""Two plain torch loops, each over half of the clients; nothing is averaged."""

import time
from contextlib import ExitStack

from workload import CLIENTS, EXAMPLES, ROUNDS, report

from fedspd.bench.results import BenchmarkSize
from fedspd.bench.training import make_block, plain_loop


def main() -> None:
    ends = []
    with ExitStack() as stack:
        data = make_block(BenchmarkSize(CLIENTS, EXAMPLES, ROUNDS, ()))
        train = plain_loop(data, 2, stack)
        for _ in range(ROUNDS + 1):
            train()
            ends.append(time.perf_counter())
    report("two plain loops", "torch", ends)


if __name__ == "__main__":
    main()
