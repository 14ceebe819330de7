"""Two plain torch loops, each over half of the clients; nothing is averaged."""

from contextlib import ExitStack

from workload import WORKLOAD, data, end_round, report

from fedspd.bench.training import plain_loop
from fedspd.core.block import Block


def main() -> None:
    ends = []
    clients = WORKLOAD.clients
    x, y = zip(*data(), strict=True)
    block = Block(range(clients), clients, x, y, WORKLOAD.examples)
    with ExitStack() as stack:
        train = plain_loop(block, 2, stack, WORKLOAD.module, WORKLOAD.batch)
        for _ in range(WORKLOAD.rounds + 1):
            train()
            ends.append(end_round())
    report("two plain loops", "torch", ends)


if __name__ == "__main__":
    main()
