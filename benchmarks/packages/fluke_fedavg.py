"""fluke: FedAvg in one process, no evaluation.

With torch's own threads, but one for the small model: its operators take microseconds, and threads
that wait for each other take many times as long, above all on a busy machine.
"""

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver
from torch import nn
from workload import WORKLOAD, RoundEnd, data, end_round, report

from fedspd.bench import plain

ends: list[RoundEnd] = []


class RoundClock(FederationObserver):
    """The observer that notes the end of each round."""

    def end_round(self, round: int) -> None:
        ends.append(end_round())


def main() -> None:
    if WORKLOAD.model == "mlp":
        torch.set_num_threads(1)
    FlukeENV().set_eval_cfg(locals=False, server=False)
    optimiser = OptimizerConfigurator(DDict(name="SGD", lr=plain.LR, momentum=plain.MOMENTUM))
    clients = []
    for index, tensors in enumerate(data()):
        loader = FastDataLoader(
            *tensors, num_labels=plain.CLASSES, batch_size=WORKLOAD.batch, shuffle=True
        )
        clients.append(
            Client(
                index,
                loader,
                None,
                optimiser,
                nn.CrossEntropyLoss(),
                local_epochs=WORKLOAD.epochs,
            )
        )
    server = Server(WORKLOAD.module(), None, clients)
    federation = FedAVG(WORKLOAD.clients, None, DDict(), clients=clients, server=server)
    federation.set_callbacks(RoundClock())
    federation.run(WORKLOAD.rounds + 1, 1.0)
    report("fluke", "fluke-fl", ends)


if __name__ == "__main__":
    main()
