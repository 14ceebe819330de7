"""Flower's simulation: FedAvg over Ray, one client per core at a time, no evaluation."""

from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workload import WORKLOAD, RoundEnd, data, end_round, report

from fedspd.bench import plain

client, server = ClientApp(), ServerApp()
ends: list[RoundEnd] = []


class TimedFedAvg(FedAvg):
    """FedAvg that notes the end of each round."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        answers = list(replies)
        trained = sum(not answer.has_error() for answer in answers)
        assert trained == WORKLOAD.clients, f"only {trained} clients trained"
        result = super().aggregate_train(server_round, answers)
        ends.append(end_round())
        return result


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    model = WORKLOAD.module()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    own = TensorDataset(*data()[int(context.node_config["partition-id"])])
    optimiser = torch.optim.SGD(model.parameters(), lr=plain.LR, momentum=plain.MOMENTUM)
    model.train()
    for _ in range(WORKLOAD.epochs):
        for x, y in DataLoader(own, batch_size=WORKLOAD.batch, shuffle=True):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(own)}),
    }
    return Message(content=RecordDict(content), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    everyone = {"min_available_nodes": WORKLOAD.clients, "min_train_nodes": WORKLOAD.clients}
    strategy = TimedFedAvg(fraction_evaluate=0.0, **everyone)
    first = ArrayRecord(WORKLOAD.module().state_dict())
    strategy.start(grid=grid, initial_arrays=first, num_rounds=WORKLOAD.rounds + 1)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, client, WORKLOAD.clients, backend_config=resources)
    report("Flower", "flwr", ends)
