"""The columns of comparison tables, and how their numbers are written."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedspd.core.scores import ACCURACY, MISSING, OTHER_SCORES, TEST_LOSS, Score
from fedspd.reporting.method_rows import Comparison, MethodRow
from fedspd.reporting.points import canonical_json
from fedspd.reporting.statistics import Interval, mean

MINUS = "\N{MINUS SIGN}"
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
    return ACCURACY.text(fraction)


def format_megabytes(count: float | None) -> str:
    """Return a number of bytes in megabytes with one digit, of few bytes with two that count."""
    if count is None:
        return MISSING
    megabytes = count / 1e6
    return f"{megabytes:.2g}" if 0 < megabytes < 0.1 else f"{megabytes:,.1f}"


def format_interval(value: Interval, score: Score = ACCURACY) -> str:
    """Return the mean of a score, with ± half of its interval if that is known."""
    return score.text(value.mean) + _format_half(value, score)


def format_difference(difference: Interval | None, score: Score = ACCURACY) -> str:
    """Return the signed difference, with ± half of its interval if that is known."""
    if difference is None or difference.mean is None:
        return MISSING
    sign = "+" if difference.mean >= 0 else MINUS
    return f"{sign}{score.text(abs(difference.mean))}{_format_half(difference, score)}"


def _format_half(value: Interval, score: Score) -> str:
    return "" if value.half is None else f" ± {score.half(value.half)}"


def _format_steps(row: MethodRow) -> str:
    ratio = f" (×{row.steps_ratio:.2g})" if row.steps_ratio > NOTABLE_RATIO else ""
    return f"{row.steps:,.0f}{ratio}"


def _format_distributions(row: MethodRow) -> str:
    scores = (f"{name} {format_percent(score)}" for name, score in row.distributions.items())
    return ", ".join(scores) or MISSING


def _format_index(index: float | None) -> str:
    return MISSING if index is None else f"{index:.2f}"


def comparison_columns(comparison: Comparison) -> list[Column]:
    """Return the columns in which at least one row has a value."""
    columns = [
        *_score_columns(comparison.score, comparison.reference),
        *_distribution_columns(),
        *_further_score_columns(comparison.score),
        *_cluster_columns(),
        *_newcomer_columns(comparison.score),
        *_cost_columns(),
    ]
    rows = comparison.rows
    return [column for column in columns if any(column.number(row) is not None for row in rows)]


def _best(score: Score) -> Callable[[Sequence[float]], float]:
    return min if score.is_error else max


def _score_columns(score: Score, reference: str) -> list[Column]:
    points, in_points = (" (pp)", " in percentage points") if score.is_percent else ("", "")
    per_cent = ", in per cent" if score.is_percent else ""
    return [
        Column(
            "seeds",
            "independent repetitions",
            lambda row: str(len(row.seeds)),
            lambda row: len(row.seeds),
        ),
        Column(
            score.heading,
            f"test {score.title}: mean over clients, then over seeds, ± its 95 % confidence "
            "interval (Student's t over seeds; over two, it is 12.7 standard errors to each side "
            "and says little)",
            lambda row: format_interval(row.score, score),
            lambda row: row.score.mean,
            _best(score),
        ),
        Column(
            f"vs {reference}{points}",
            f"difference in {score.title} to {reference}{in_points}, paired by seed, "
            "± its 95 % confidence interval",
            lambda row: format_difference(row.difference, score),
            lambda row: row.difference.mean if row.difference else None,
            is_difference=True,
        ),
        Column(
            f"spread{points}",
            f"standard deviation of the {score.title} over clients",
            lambda row: score.text(row.std),
            lambda row: row.std,
            min,
            is_brief=False,
        ),
        Column(
            "worst 10 %",
            f"mean {score.title} of the worst 10 % of the clients{per_cent}",
            lambda row: score.text(row.worst),
            lambda row: row.worst,
            _best(score),
        ),
        Column(
            "hurt (%)",
            "share of the clients whose score is worse than with local-only training, paired by "
            "seed and client; few test examples make it noisy",
            lambda row: format_percent(row.hurt),
            lambda row: row.hurt,
            min,
        ),
    ]


def _distribution_columns() -> list[Column]:
    return [
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
    ]


def _further_score_columns(main: Score) -> list[Column]:
    percent = " (%)" if main.is_percent else ""
    columns = [
        Column(
            f"before final{percent}",
            f"{main.title} before the final phase",
            lambda row: format_interval(row.before, main),
            lambda row: row.before.mean,
            _best(main),
            is_brief=False,
        ),
        *(_metric_column(score) for score in OTHER_SCORES),
    ]
    if main == TEST_LOSS:
        return columns
    loss = Column(
        "test loss",
        "mean over clients, then over seeds",
        lambda row: TEST_LOSS.text(row.test_loss.mean),
        lambda row: row.test_loss.mean,
        min,
        is_brief=False,
    )
    return [*columns, loss]


def _metric_column(score: Score) -> Column:
    unknown = Interval(None, None)
    return Column(
        score.heading,
        f"{score.title}: mean over clients, then over seeds, ± its 95 % confidence interval",
        lambda row: format_interval(row.metrics.get(score.name, unknown), score),
        lambda row: row.metrics.get(score.name, unknown).mean,
        _best(score),
    )


def _cluster_columns() -> list[Column]:
    return [
        Column(
            "clusters found",
            "number of clusters of a method that can find it; each number, if seeds differ",
            lambda row: ", ".join(map(str, row.clusters)) or MISSING,
            lambda row: max(row.clusters, default=None),
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
            "alike, 0 by chance, for any number of either",
            lambda row: _format_index(row.adjusted_rand_index),
            lambda row: row.adjusted_rand_index,
            max,
            is_brief=False,
        ),
    ]


def _newcomer_columns(score: Score) -> list[Column]:
    return [
        Column(
            "newcomers (%)" if score.is_percent else f"newcomers' {score.title}",
            f"{score.title} of the clients that joined after training",
            lambda row: format_interval(row.newcomers, score),
            lambda row: row.newcomers.mean,
            _best(score),
        ),
        Column(
            "newcomers' loss",
            "test loss of the clients that joined after training",
            lambda row: TEST_LOSS.text(row.newcomers_loss.mean),
            lambda row: row.newcomers_loss.mean,
            min,
            is_brief=False,
        ),
    ]


def _cost_columns() -> list[Column]:
    return [
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
    ]


def describe_target(comparison: Comparison) -> str:
    """Return the target as a phrase, such as: accuracy of at least 80.0 %."""
    score = comparison.score
    bound = "most" if score.is_error else "least"
    return f"{score.title} of at {bound} {score.text(comparison.target)}{score.unit}"


def target_columns(comparison: Comparison) -> list[Column]:
    """Return the columns of the table of what the target score costs; none without a target."""
    if comparison.target is None:
        return []

    def column(title: str, name: str, format: Callable[[float | None], str]) -> Column:
        def number(row: MethodRow) -> float | None:
            found: float | None = getattr(row.target, name)
            return found

        meaning = "until the first evaluated round, or the final phase, that reaches the target"
        return Column(title, meaning, lambda row: format(number(row)), number, min)

    reached = Column(
        "seeds",
        "repetitions that reach the target; costs are means over these",
        lambda row: f"{row.target.reached if row.target else 0} of {len(row.seeds)}",
        lambda row: row.target.reached if row.target else 0,
    )
    return [
        reached,
        column("round", "round", lambda n: MISSING if n is None else f"{n:.0f}"),
        column("MB p2p", "bytes", format_megabytes),
        column("time (s)", "seconds", lambda n: MISSING if n is None else f"{n:,.1f}"),
        column("steps", "steps", lambda n: MISSING if n is None else f"{n:,.0f}"),
    ]


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
