"""The measurements of one block of clients."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspd.core.metrics import CenterMoments


@dataclass(frozen=True)
class Measures:
    """One block's part of what is recorded about a round."""

    accuracy_C: NDArray[np.float64]
    test_loss_C: NDArray[np.float64]
    loss_C: NDArray[np.float64] | None
    mixture_CS: NDArray[np.float64] | None
    table_CSD: NDArray[np.int64] | None
    moments: CenterMoments | None

    @classmethod
    def joined(cls, parts: list["Measures"]) -> "Measures":
        def whole(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            if values[0] is None:
                return None
            return sum(values[1:], start=values[0]) if name == "moments" else np.concatenate(values)

        return cls(*(whole(field.name) for field in dataclasses.fields(cls)))
