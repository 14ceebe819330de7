"""What a table or a figure shows of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import pstdev

from fedspd.storage.atomic import Json


def _last(field: str) -> Callable[[Json], float | None]:
    """Return a function that looks up the last point of a curve in a record."""
    return lambda record: (record.get("curve", {}).get(field) or [None])[-1]


def _spread(record: Json) -> float | None:
    scores = [score for score in record.get("clients", ()) if score is not None]
    return pstdev(scores) if scores else None


@dataclass(frozen=True)
class Measure:
    """A field of a record or of its curve, and how a person reads it.

    find   looks its value up in a record; default: the field
    """

    field: str
    title: str
    factor: float = 100.0  # from the record's unit to that of the table
    digits: int = 1
    find: Callable[[Json], float | None] | None = None

    def value_of(self, record: Json) -> float | None:
        """Return the record's value in the table's unit; None: it was not recorded."""
        value = self.find(record) if self.find else record.get(self.field)
        return None if value is None else round(self.factor * float(value), 9)


TRAINING = "training_accuracy"
MEASURES = {
    "accuracy": Measure("accuracy", "test accuracy (%)"),
    "before": Measure("before", "test accuracy before the final phase (%)"),
    TRAINING: Measure(TRAINING, "training accuracy (%)", find=_last(TRAINING)),
    "loss": Measure("loss", "mean training loss", 1.0, 3, _last("loss")),
    "spread": Measure(
        "clients", "standard deviation of test accuracy over clients (points)", find=_spread
    ),
    "models": Measure("models", "models sent, point-to-point", 1.0, 0),
    "multicast": Measure("multicast", "megabytes sent by multicast", 1e-6),
    "point_to_point": Measure("point_to_point", "megabytes sent, point-to-point", 1e-6),
}
