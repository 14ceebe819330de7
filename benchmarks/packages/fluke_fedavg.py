"""fluke: FedAvg in one process, with torch's own threads, no evaluation."""

import time

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver
from torch import nn
from workload import CLIENTS, ROUNDS, data, report

from fedspd.bench import plain

ends: list[float] = []


class RoundClock(FederationObserver):
    """The observer that notes the end of each round."""

    def end_round(self, round: int) -> None:
        ends.append(time.perf_counter())


def main() -> None:
    FlukeENV().set_eval_cfg(locals=False, server=False)
    optimiser = OptimizerConfigurator(DDict(name="SGD", lr=plain.LR, momentum=plain.MOMENTUM))
    clients = []
    for index, tensors in enumerate(data()):
        loader = FastDataLoader(
            *tensors, num_labels=plain.CLASSES, batch_size=plain.BATCH, shuffle=True
        )
        clients.append(
            Client(index, loader, None, optimiser, nn.CrossEntropyLoss(), local_epochs=plain.EPOCHS)
        )
    federation = FedAVG(
        CLIENTS, None, DDict(), clients=clients, server=Server(plain.PlainCNN(), None, clients)
    )
    federation.set_callbacks(RoundClock())
    federation.run(ROUNDS + 1, 1.0)
    report("fluke", "fluke-fl", ends)


if __name__ == "__main__":
    main()
