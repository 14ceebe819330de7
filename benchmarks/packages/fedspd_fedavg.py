"""fedspd's simulator: FedAvg with a server (a star) and two workers.

Only the last round is evaluated, and it is not timed.
"""

import torch
from workload import WORKLOAD, RoundEnd, data, end_round, report

import fedspd


class RoundClock(fedspd.Callback):
    """The callback that notes the end of each round."""

    def __init__(self) -> None:
        self.ends: list[RoundEnd] = []

    def on_round(self, event: dict) -> None:
        self.ends.append(end_round())


def main() -> None:
    clock = RoundClock()
    x, y = (torch.cat(parts) for parts in zip(*data(), strict=True))
    pool = (torch.cat([x, x]), y.repeat(2), x[:500], y[:500])  # clients are assigned half of it
    rounds = WORKLOAD.rounds + 2
    config = {
        "method": "fedavg",
        "clients": WORKLOAD.clients,
        "rounds": rounds,
        "evaluate_every": rounds,
        "data": {"examples": WORKLOAD.examples, "mixture": "iid"},
        "topology": {"kind": "star"},
        "model": {"name": WORKLOAD.model},
        "training": {"batch": WORKLOAD.batch, "epochs": WORKLOAD.epochs},
    }
    fedspd.run(config, data=pool, workers=2, callbacks=[clock])
    report("fedspd", "fedspd", clock.ends[:-1])


if __name__ == "__main__":
    main()
