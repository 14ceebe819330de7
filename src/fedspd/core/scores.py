"""The scores of clients: what records call them, and how people read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MISSING = "–"


@dataclass(frozen=True)
class Score:
    """A score of every client.

    name        in events and results
    title       in tables and figures
    is_percent  whether people read it in per cent; else it has its own unit, or none
    is_error    the lower, the better
    """

    name: str
    title: str
    is_percent: bool = False
    is_error: bool = False

    @property
    def unit(self) -> str:
        """What follows a value in a sentence."""
        return " %" if self.is_percent else ""

    @property
    def stem(self) -> str:
        """What the names of figures begin with."""
        return self.name.replace("_", "-")

    @property
    def heading(self) -> str:
        """The title with its unit, as the head of a column or the label of an axis."""
        return f"{self.title} (%)" if self.is_percent else self.title

    def text(self, value: float | None) -> str:
        """Return the value in per cent with one digit, or with three significant digits."""
        if value is None:
            return MISSING
        return f"{100 * value:.1f}" if self.is_percent else f"{value:.3g}"

    def half(self, width: float) -> str:
        """Return the half-width of an interval."""
        return f"{100 * width:.1f}" if self.is_percent else f"{width:.2g}"

    def is_better(self, one: float, other: float) -> bool:
        """Return whether one value is better than another."""
        return one < other if self.is_error else one > other


ACCURACY = Score("accuracy", "accuracy", is_percent=True)
RMSE = Score("rmse", "RMSE", is_error=True)
TEST_LOSS = Score("test_loss", "loss", is_error=True)  # of the test examples
R2 = Score("r2", "R2")
# Those that a table shows beside the main one.
OTHER_SCORES = (Score("macro_f1", "macro F1", is_percent=True), Score("auc", "AUC"), R2)


def main_score(clients: Mapping[str, Any]) -> Score:
    """Return the score that decides: the accuracy, or the RMSE of a regression.

    `clients` has a list over clients, or one client's value, for each score. Records without both
    have the test loss.
    """
    for score in (ACCURACY, RMSE):
        values = clients.get(score.name)
        if any(v is not None for v in (values if isinstance(values, list) else [values])):
            return score
    return TEST_LOSS
