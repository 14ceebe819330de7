"""The exchange of a block without its models."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspd.core.exchange import Exchange


@dataclass(frozen=True)
class Announcements:
    """An exchange without its models: what the engine must know to tell who hears what."""

    cluster_CK: NDArray[np.int64]
    weight_CK: NDArray[np.float64]
    want_CM: NDArray[np.int64]
    note_C: NDArray[np.int64]
    size: int  # P of what is offered
    is_model: bool

    @classmethod
    def of(cls, request: Exchange) -> "Announcements":
        note = torch.zeros(len(request.cluster_CK)) if request.note_C is None else request.note_C
        parts = (request.cluster_CK, request.weight_CK.double(), request.want_CM, note.long())
        cluster, weight, want, notes = (part.cpu().numpy().copy() for part in parts)
        return cls(cluster, weight, want, notes, request.model_CKP.shape[2], request.is_model)

    @classmethod
    def joined(cls, headers: list["Announcements"]) -> "Announcements":
        tables = zip(*(header.tables for header in headers), strict=True)
        cluster, weight, want, notes = (np.concatenate(table) for table in tables)
        return cls(cluster, weight, want, notes, headers[0].size, headers[0].is_model)

    @property
    def tables(self) -> tuple[NDArray[Any], ...]:
        return self.cluster_CK, self.weight_CK, self.want_CM, self.note_C

    def rows(self, clients: NDArray[np.int64]) -> "Announcements":
        cluster, weight, want, notes = (table[clients] for table in self.tables)
        return Announcements(cluster, weight, want, notes, self.size, self.is_model)

    def with_models(self, model_CKP: Tensor) -> Exchange:
        cluster, weight, want, note = (torch.from_numpy(table) for table in self.tables)
        return Exchange(cluster, model_CKP, weight, want, note, self.is_model)
