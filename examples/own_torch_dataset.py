"""Train on your own torch dataset: any map-style one whose items are pairs (x, y).

Run it with: python own_torch_dataset.py
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

import fedspd


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """The digits of scikit-learn, scaled to -1..1."""

    def __init__(self) -> None:
        self.digits = load_digits()

    def __len__(self) -> int:
        return len(self.digits.target)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.tensor(self.digits.images[index], dtype=torch.float32)
        return image[None] / 8 - 1, int(self.digits.target[index])


config = {
    "clients": 8,
    "rounds": 10,
    "training": {"lr": 0.1, "batch": 20},
}
result = fedspd.run(config, data=Digits())
print(f"Test accuracy, mean over {len(result.accuracy)} clients: {result.accuracy.mean():.1%}")
