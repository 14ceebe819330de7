"""The announcements of an exchange: everything but its models."""

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
    """An exchange without its models: all that decides who receives which model.

    The fields are those of `Exchange`; `size` is P, the length of each offered vector.
    """

    cluster_CK: NDArray[np.int64]
    weight_CK: NDArray[np.float64]
    want_CM: NDArray[np.int64]
    note_C: NDArray[np.int64]
    size: int
    is_model: bool

    @classmethod
    def of(cls, exchange: Exchange) -> "Announcements":
        note_C = exchange.note_C
        if note_C is None:
            note_C = torch.zeros(len(exchange.cluster_CK))
        tensors = (
            exchange.cluster_CK,
            exchange.weight_CK.double(),
            exchange.want_CM,
            note_C.long(),
        )
        cluster, weight, want, note = (tensor.cpu().numpy().copy() for tensor in tensors)
        return cls(cluster, weight, want, note, exchange.model_CKP.shape[2], exchange.is_model)

    @classmethod
    def merge(cls, parts: Sequence["Announcements | None"]) -> "Announcements":
        """Return the announcements of all blocks as one; every block must make the exchange."""
        made = [part for part in parts if part is not None]
        if len(made) < len(parts):
            raise MethodError(
                "The method's round makes more exchanges in some blocks of clients than in others; "
                "expected the same number in every block."
            )
        if len({part._equal_in_all_blocks for part in made}) > 1:
            raise MethodError(
                "The method's round yields exchanges of different shapes in different blocks of "
                "clients; expected the same K, M and P in every block."
            )
        tables = zip(*(part._tables for part in made), strict=True)
        cluster, weight, want, note = (np.concatenate(table) for table in tables)
        return cls(cluster, weight, want, note, made[0].size, made[0].is_model)

    @property
    def _equal_in_all_blocks(self) -> tuple[int, int, int, bool]:
        """K, M, P, and whether the vectors are models."""
        return self.cluster_CK.shape[1], self.want_CM.shape[1], self.size, self.is_model

    @property
    def _tables(self) -> tuple[NDArray[Any], ...]:
        return self.cluster_CK, self.weight_CK, self.want_CM, self.note_C

    @property
    def model_shape(self) -> tuple[int, int, int]:
        """The shape of the offered models: clients, K and P."""
        clients, K = self.cluster_CK.shape
        return clients, K, self.size

    def select_clients(self, clients: NDArray[np.int64]) -> "Announcements":
        cluster, weight, want, note = (table[clients] for table in self._tables)
        return Announcements(cluster, weight, want, note, self.size, self.is_model)

    def with_models(self, model_CKP: Tensor) -> Exchange:
        cluster, weight, want, note = (torch.from_numpy(table) for table in self._tables)
        return Exchange(cluster, model_CKP, weight, want, note, self.is_model)
