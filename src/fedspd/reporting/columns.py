"""The columns of a comparison table, and how their values are written."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedspd.reporting.method_rows import Comparison, MethodRow
from fedspd.reporting.points import canonical_json
from fedspd.reporting.statistics import Interval, mean

MINUS, MISSING = "\N{MINUS SIGN}", "–"
NOTABLE_RATIO = 1.005  # smaller ones are rounding


@dataclass(frozen=True)
class Column:
    """A column of a comparison table; `best` is max or min if one value is better than another."""

    title: str
    meaning: str
    text: Callable[[MethodRow], str]
    number: Callable[[MethodRow], float | None]
    best: Callable[[Sequence[float]], float] | None = None
    is_brief: bool = True  # also shown where there is little room
    is_difference: bool = False


def format_percent(fraction: float | None) -> str:
    """Return the fraction in per cent with one digit."""
    return MISSING if fraction is None else f"{100 * fraction:.1f}"


def format_megabytes(count: float) -> str:
    """Return a number of bytes in megabytes with one digit, of few bytes with two that count."""
    megabytes = count / 1e6
    return f"{megabytes:.2g}" if 0 < megabytes < 0.1 else f"{megabytes:,.1f}"


def format_loss(loss: float | None) -> str:
    """Return the loss with three significant digits."""
    return MISSING if loss is None else f"{loss:.3g}"


def format_interval(score: Interval) -> str:
    """Return the mean in per cent, with ± half of its interval if that is known."""
    return format_percent(score.mean) + _format_half(score)


def format_difference(difference: Interval | None) -> str:
    """Return the signed difference in percentage points, with ± half of its interval if known."""
    if difference is None or difference.mean is None:
        return MISSING
    sign = "+" if difference.mean >= 0 else MINUS
    return f"{sign}{abs(100 * difference.mean):.1f}{_format_half(difference)}"


def _format_half(score: Interval) -> str:
    return "" if score.half is None else f" ± {100 * score.half:.1f}"


def _format_steps(row: MethodRow) -> str:
    ratio = f" (×{row.steps_ratio:.2g})" if row.steps_ratio > NOTABLE_RATIO else ""
    return f"{row.steps:,.0f}{ratio}"


def _format_distributions(row: MethodRow) -> str:
    scores = (f"{name} {format_percent(score)}" for name, score in row.distributions.items())
    return ", ".join(scores) or MISSING


def _format_index(index: float | None) -> str:
    return MISSING if index is None else f"{index:.2f}"


ACCURACY = (
    Column(
        "seeds",
        "independent repetitions",
        lambda row: str(len(row.seeds)),
        lambda row: len(row.seeds),
    ),
    Column(
        "accuracy (%)",
        "test accuracy: mean over clients, then over seeds, ± its 95 % confidence interval "
        "(Student's t over seeds)",
        lambda row: format_interval(row.accuracy),
        lambda row: row.accuracy.mean,
        max,
    ),
)
SCORES = (
    Column(
        "spread (pp)",
        "standard deviation of the accuracy over clients",
        lambda row: format_percent(row.std),
        lambda row: row.std,
        min,
        is_brief=False,
    ),
    Column(
        "worst 10 %",
        "mean accuracy of the worst 10 % of the clients, in per cent",
        lambda row: format_percent(row.worst),
        lambda row: row.worst,
        max,
    ),
    Column(
        "hurt (%)",
        "share of the clients whose score is worse than with local-only training, paired by "
        "seed and client; few test examples make it noisy",
        lambda row: format_percent(row.hurt),
        lambda row: row.hurt,
        min,
    ),
    Column(
        "by distribution (%)",
        "test accuracy on the examples of each true distribution, over all clients",
        _format_distributions,
        lambda row: mean(list(row.distributions.values())),
        is_brief=False,
    ),
    Column(
        "worst distribution",
        "test accuracy on the distribution with the lowest of each seed, in per cent",
        lambda row: format_percent(row.worst_distribution),
        lambda row: row.worst_distribution,
        max,
        is_brief=False,
    ),
    Column(
        "smallest distribution",
        "test accuracy on the distribution that the clients have least of, in per cent: the "
        "smallest population, if clients are pure",
        lambda row: format_percent(row.smallest_distribution),
        lambda row: row.smallest_distribution,
        max,
        is_brief=False,
    ),
    Column(
        "before final (%)",
        "accuracy before the final phase",
        lambda row: format_interval(row.before),
        lambda row: row.before.mean,
        max,
        is_brief=False,
    ),
    Column(
        "test loss",
        "mean over clients, then over seeds",
        lambda row: format_loss(row.test_loss.mean),
        lambda row: row.test_loss.mean,
        min,
        is_brief=False,
    ),
    Column(
        "purity",
        "share of the examples whose cluster stands for their true distribution; "
        "with two distributions 0.5 is chance",
        lambda row: _format_index(row.purity),
        lambda row: row.purity,
        max,
        is_brief=False,
    ),
    Column(
        "ARI",
        "adjusted Rand index of clusters and true distributions: 1 if they group the examples "
        "alike, 0 by chance, whatever their numbers",
        lambda row: _format_index(row.adjusted_rand_index),
        lambda row: row.adjusted_rand_index,
        max,
        is_brief=False,
    ),
    Column(
        "newcomers (%)",
        "accuracy of the clients that joined after training",
        lambda row: format_interval(row.newcomers),
        lambda row: row.newcomers.mean,
        max,
    ),
    Column(
        "newcomers' loss",
        "test loss of the clients that joined after training",
        lambda row: format_loss(row.newcomers_loss.mean),
        lambda row: row.newcomers_loss.mean,
        min,
        is_brief=False,
    ),
)
COSTS = (
    Column(
        "MB multicast",
        "megabytes sent if one transmission reaches all neighbours",
        lambda row: format_megabytes(row.multicast),
        lambda row: row.multicast,
        min,
        is_brief=False,
    ),
    Column(
        "MB p2p",
        "megabytes sent point-to-point: one copy for each neighbour",
        lambda row: format_megabytes(row.point_to_point),
        lambda row: row.point_to_point,
        min,
    ),
    Column(
        "models",
        "models sent point-to-point",
        lambda row: f"{row.models:,.0f}",
        lambda row: row.models,
        min,
        is_brief=False,
    ),
    Column(
        "steps",
        "gradient steps of all clients; × is their ratio to one local update by every client "
        "in every round, if there are more",
        _format_steps,
        lambda row: row.steps,
        min,
    ),
    Column(
        "time (s)",
        "seconds of all rounds and the final phase, without evaluation; "
        "parallel runs slow each other down",
        lambda row: f"{row.seconds:,.1f}",
        lambda row: row.seconds,
        min,
    ),
)


def comparison_columns(comparison: Comparison) -> list[Column]:
    """Return the columns in which at least one row has a value."""
    columns = (*ACCURACY, _difference_column(comparison.reference), *SCORES, *COSTS)
    rows = comparison.rows
    return [column for column in columns if any(column.number(row) is not None for row in rows)]


def _difference_column(reference: str) -> Column:
    return Column(
        f"vs {reference} (pp)",
        f"difference in accuracy to {reference} in percentage points, paired by seed, "
        "± its 95 % confidence interval",
        lambda row: format_difference(row.difference),
        lambda row: row.difference.mean if row.difference else None,
        is_difference=True,
    )


def is_best(comparison: Comparison, row: MethodRow, column: Column) -> bool:
    """Return whether the row is the best at its shared point; if all are equal, none is."""
    own = column.number(row)
    if column.best is None or own is None:
        return False
    point = canonical_json(row.shared_point)
    rows = [other for other in comparison.rows if canonical_json(other.shared_point) == point]
    known = [number for other in rows if (number := column.number(other)) is not None]
    return not is_equal(min(known), max(known)) and is_equal(own, column.best(known))


def is_equal(one: float, other: float) -> bool:
    """Return whether two numbers agree up to the order of their sums: records have nine digits."""
    return math.isclose(one, other, rel_tol=1e-7, abs_tol=1e-9)


def point_cells(comparison: Comparison, row: MethodRow) -> list[str]:
    """Return the row's value on each shared axis."""
    return [str(row.point.get(axis, MISSING)) for axis in comparison.shared_axes]
