"""What a table or a figure shows of a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A field of a record, and how a person reads it."""

    field: str
    title: str
    factor: float = 100.0  # from the record's unit to that of the table
    digits: int = 1


MEASURES = {
    "accuracy": Measure("accuracy", "test accuracy (%)"),
    "before": Measure("before", "test accuracy before the final phase (%)"),
    "training_accuracy": Measure("training_accuracy", "training accuracy (%)"),
    "loss": Measure("loss", "mean training loss", 1.0, 3),
    "models": Measure("models", "models sent, point-to-point", 1.0, 0),
    "multicast": Measure("multicast", "megabytes sent by multicast", 1e-6),
    "point_to_point": Measure("point_to_point", "megabytes sent, point-to-point", 1e-6),
}
