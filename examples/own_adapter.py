"""Train adapters on a frozen model: they alone travel. Here low-rank ones (LoRA).

Run it with: python own_adapter.py
"""

import torch
from torch import Tensor, nn

import fedspd


class LowRank(nn.Module):
    """A linear layer that stays as it is, and a low-rank change of it that is trained."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))  # no change at first

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with the change added."""
        change: Tensor = x @ self.down.T @ self.up.T
        return self.layer(x) + change


def with_adapters(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a network whose hidden layers are frozen but for their adapters.

    A real backbone would load its weights here: `backbone.load_state_dict(torch.load(...))`.
    """
    inputs = int(torch.tensor(shape).prod())
    hidden = [LowRank(nn.Linear(inputs, 64)), nn.ReLU(), LowRank(nn.Linear(64, 64)), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, classes))


def count(model: nn.Module) -> int:
    """Return the number of parameters, frozen ones included."""
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    config = {"method": "fedavg", "clients": 8, "rounds": 10, "training": {"lr": 0.1, "batch": 20}}
    whole = fedspd.run(config, model=with_adapters)
    first = {**config, "exchange": {"only": ["1", "3"]}}  # the head stays at home: FedPer
    personal = fedspd.run(first, model=with_adapters)
    for name, result in (("adapters and head", whole), ("adapters alone", personal)):
        sent, size = result.events()[0]["traffic"][0]["model_bytes"] // 4, count(result.model(0))
        print(f"{name}: {result.accuracy.mean():.1%} right, {sent} of {size} parameters travel")
