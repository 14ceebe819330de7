"""fedspd's simulator: FedAvg on a complete graph with two workers.

Only the last round is evaluated, and it is not timed.
"""

import time

import torch
from workload import CLIENTS, EXAMPLES, ROUNDS, data, report

import fedspd


class RoundClock(fedspd.Callback):
    """The callback that notes the end of each round."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_round(self, event: dict) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    clock = RoundClock()
    x, y = (torch.cat(parts) for parts in zip(*data(), strict=True))
    pool = (x.repeat(2, 1, 1, 1), y.repeat(2), x[:500], y[:500])  # clients are assigned half of it
    rounds = ROUNDS + 2
    config = {
        "method": "fedavg",
        "clients": CLIENTS,
        "rounds": rounds,
        "evaluate_every": rounds,
        "data": {"examples": EXAMPLES, "mixture": "iid"},
        "topology": {"kind": "complete"},
        "model": {"name": "cnn"},
    }
    fedspd.run(config, data=pool, workers=2, callbacks=[clock])
    report("fedspd", "fedspd", clock.ends[:-1])


if __name__ == "__main__":
    main()
