"""Validation examples: set aside from every client's training examples, they choose the best round.

The score of a round is the mean over clients of their validation losses; the lowest one wins.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedspd.core.block import Block
from fedspd.core.keys import Key
from fedspd.runtime.measures import Measures
from fedspd.runtime.plan import GroundTruth
from fedspd.storage.atomic import Json


def split_validation(
    train: Block, truth: GroundTruth, share: float, key: Key
) -> tuple[Block, Block, GroundTruth]:
    """Return training and validation examples, and the ground truth of the former.

    A client's draw depends on its id alone. It keeps at least one training example.
    """
    kept, aside = [], []
    for client, y in zip(train.clients, train.y, strict=True):
        count = min(len(y) - 1, max(1, round(share * len(y))))
        order = torch.randperm(len(y), generator=key.of("validation", client).torch())
        kept.append(order[max(count, 0) :].sort().values)
        aside.append(order[: max(count, 0)].sort().values)

    def part(rows: list[Tensor]) -> Block:
        x, targets = (
            [own[r] for own, r in zip(table, rows, strict=True)] for table in (train.x, train.y)
        )
        return replace(train, x=x, y=targets, width=max(1, *map(len, targets)))

    known = [own[rows.numpy()] for own, rows in zip(truth, kept, strict=True)]
    return part(kept), part(aside), known


@dataclass
class BestRound:
    """The best round so far, and whether a run has waited long enough for a better one."""

    patience: int | None
    round: int = 0
    loss: float = math.inf

    def improves(self, round: int, measures: Measures) -> bool:
        """Return whether this round is the best so far, and remember it."""
        loss_C = measures.validation_C["loss"]
        known = loss_C[~np.isnan(loss_C)]
        loss = float(known.mean()) if len(known) else math.inf
        if loss >= self.loss:
            return False
        self.round, self.loss = round, loss
        return True

    def stop_reason(self, round: int) -> str | None:
        """Return why the run stops after this round, or None."""
        if self.patience is None or round - self.round < self.patience:
            return None
        return (
            f"after round {round}: the validation loss has not improved since round {self.round} "
            f"(patience = {self.patience})"
        )

    def as_json(self) -> Json:
        return {"round": self.round, "loss": self.loss if math.isfinite(self.loss) else None}

    def restore(self, content: Json) -> None:
        """Restore the best round from a checkpoint."""
        self.round = content["round"]
        self.loss = math.inf if content["loss"] is None else content["loss"]
