"""The exchange of a block without its models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspd.core.errors import MethodError
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
    def joined(cls, parts: Sequence["Announcements | None"]) -> "Announcements":
        """Return the announcements of all blocks as one; every block must make the exchange."""
        headers = [part for part in parts if part is not None]
        if len(headers) < len(parts):
            raise MethodError(
                "The method's round makes more exchanges in some blocks of clients than in others; "
                "expected the same number in every block."
            )
        if len({header.shape for header in headers}) > 1:
            raise MethodError(
                "The method's round yields exchanges of different shapes in different blocks of "
                "clients; expected the same K, M and P in every block."
            )
        tables = zip(*(header.tables for header in headers), strict=True)
        cluster, weight, want, notes = (np.concatenate(table) for table in tables)
        return cls(cluster, weight, want, notes, headers[0].size, headers[0].is_model)

    @property
    def shape(self) -> tuple[int, int, int, bool]:
        """What must be the same in every block: K, M, P, and whether these are models."""
        return self.cluster_CK.shape[1], self.want_CM.shape[1], self.size, self.is_model

    @property
    def tables(self) -> tuple[NDArray[Any], ...]:
        return self.cluster_CK, self.weight_CK, self.want_CM, self.note_C

    def rows(self, clients: NDArray[np.int64]) -> "Announcements":
        cluster, weight, want, notes = (table[clients] for table in self.tables)
        return Announcements(cluster, weight, want, notes, self.size, self.is_model)

    def with_models(self, model_CKP: Tensor) -> Exchange:
        cluster, weight, want, note = (torch.from_numpy(table) for table in self.tables)
        return Exchange(cluster, model_CKP, weight, want, note, self.is_model)
