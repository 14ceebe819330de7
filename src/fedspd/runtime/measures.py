"""What is measured of a round."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedspd.core.metrics import CenterMoments

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True)
class Measures:
    """The measures of a block's clients, or of all; None where the method lets nothing be observed.

    accuracy_C    test accuracy; NaN for a regression
    test_loss_C   mean test loss
    loss_C        mean training loss
    mixture_CS    share of every cluster in the client's examples
    table_CSD     number of examples by cluster and true distribution
    moments       sums over the clients' centers, for the consensus distance
    clusters_C    number of clusters that the client found
    spectrum_CM   eigenvalues by which this number was found
    bodies_C      number of bodies that these clusters have
    tests_C2D     wrong (0) and right (1) test examples by true distribution; None if either is
                  unknown
    classes_2K    wrong (0) and right (1) test examples of all clients by class; None: a regression
    scores_C      other scores of the test examples, by name
    validation_C  the same scores, accuracy and loss of the validation examples; NaN without any
    """

    accuracy_C: NDArray[np.float64]
    test_loss_C: NDArray[np.float64]
    loss_C: NDArray[np.float64] | None
    mixture_CS: NDArray[np.float64] | None
    table_CSD: NDArray[np.int64] | None
    moments: CenterMoments | None
    clusters_C: NDArray[np.int64] | None = None
    tests_C2D: NDArray[np.int64] | None = None
    spectrum_CM: NDArray[np.float64] | None = None
    bodies_C: NDArray[np.int64] | None = None
    scores_C: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    validation_C: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    classes_2K: NDArray[np.int64] | None = None

    @classmethod
    def merge(cls, parts: Sequence["Measures"]) -> "Measures":
        """Return the measures of all blocks, in their order."""
        moments = [part.moments for part in parts if part.moments is not None]
        return cls(
            np.concatenate([part.accuracy_C for part in parts]),
            np.concatenate([part.test_loss_C for part in parts]),
            _concatenate([part.loss_C for part in parts]),
            _concatenate([part.mixture_CS for part in parts]),
            _concatenate([part.table_CSD for part in parts]),
            sum(moments[1:], start=moments[0]) if moments else None,
            _concatenate([part.clusters_C for part in parts]),
            _concatenate([part.tests_C2D for part in parts]),
            _concatenate([part.spectrum_CM for part in parts]),
            _concatenate([part.bodies_C for part in parts]),
            _concatenate_each([part.scores_C for part in parts]),
            _concatenate_each([part.validation_C for part in parts]),
            _add([part.classes_2K for part in parts]),
        )


def _concatenate(tables: Sequence[NDArray[Number] | None]) -> NDArray[Number] | None:
    present = [table for table in tables if table is not None]
    return np.concatenate(present) if present else None


def _add(tables: Sequence[NDArray[np.int64] | None]) -> NDArray[np.int64] | None:
    present = [table for table in tables if table is not None]
    return np.sum(present, axis=0) if present else None


def _concatenate_each(
    parts: Sequence[dict[str, NDArray[np.float64]]],
) -> dict[str, NDArray[np.float64]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
