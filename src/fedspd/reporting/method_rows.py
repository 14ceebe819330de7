"""Summarise the runs of a comparison: one row for each method at each point, over all seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedspd.core.scores import ACCURACY, OTHER_SCORES, TEST_LOSS, Score
from fedspd.reporting.points import (
    canonical_json,
    distinct_points,
    format_label,
    format_point,
    without_own_options,
)
from fedspd.reporting.runs import Run
from fedspd.reporting.statistics import Interval, confidence_interval, mean, paired_difference
from fedspd.storage.atomic import Json
from fedspd.storage.history import COSTS, reach

ALONE = "local"  # the method without any exchange
TARGET_SHARE = 0.95  # of the best score, if no target is given
ScoreLine = list[tuple[Any, Interval]]  # values of an axis, each with its score


@dataclass(frozen=True)
class ScoreCurve:
    """The main score by round, and what it had cost, over the rounds that every seed evaluated."""

    rounds: list[int]
    score: list[Interval]
    bytes: list[float]  # point-to-point
    seconds: list[float]
    steps: list[float]


@dataclass(frozen=True)
class Target:
    """What the first round with the target score had cost, over the seeds that reach it."""

    reached: int  # seeds
    round: float | None
    bytes: float | None  # point-to-point
    seconds: float | None
    steps: float | None


@dataclass(frozen=True)
class MethodRow:
    """One method at one point; counts, bytes and seconds are means over its seeds.

    The score is the main one of the comparison: accuracy, or RMSE in a regression.
    """

    method: str
    point: Json
    seeds: list[int]
    score: Interval
    difference: Interval | None  # in score to the reference method, paired by seed
    std: float | None  # standard deviation of the score over clients
    worst: float | None  # mean score of the worst 10 % of the clients
    before: Interval  # score before the final phase
    test_loss: Interval
    metrics: dict[str, Interval]  # the other scores by name
    target: Target | None  # what the target score had cost
    classes: dict[str, float | None]  # accuracy by name of the class
    distributions: dict[str, float | None]  # accuracy by name of the distribution, if several
    worst_distribution: float | None  # accuracy
    smallest_distribution: float | None  # accuracy
    hurt: float | None  # share of the clients that local-only training serves better
    clusters: tuple[int, ...]  # the numbers that the runs found, if the method can find it
    purity: float | None  # of the clusters, if the method assigns examples to clusters
    adjusted_rand_index: float | None
    newcomers: Interval  # score of clients that joined after training
    newcomers_loss: Interval
    multicast: float  # bytes
    point_to_point: float  # bytes
    models: float
    steps: float
    steps_ratio: float  # to one local update by every client in every round
    seconds: float
    curve: ScoreCurve
    clients: list[list[float | None]]  # score by seed and client

    @property
    def label(self) -> str:
        return format_label(self.method, self.point)

    @property
    def name(self) -> str:
        """The method with those of its own options that vary."""
        shared = self.shared_point
        own = {key: value for key, value in self.point.items() if key not in shared}
        return format_label(self.method, own)

    @property
    def shared_point(self) -> Json:
        return without_own_options(self.method, self.point)


@dataclass(frozen=True)
class Comparison:
    """Comparable runs, and one row for each method at each point."""

    runs: list[Run]
    rows: list[MethodRow]
    reference: str  # the method that all others are compared with
    axes: list[str]  # the keys of the points
    notes: list[str]  # which runs are left out, and why
    score: Score = ACCURACY  # that decides
    target: float | None = None  # a score, whose cost is compared

    @property
    def shared_points(self) -> list[Json]:
        """The points at which methods are compared."""
        return distinct_points(row.shared_point for row in self.rows)

    @property
    def shared_axes(self) -> list[str]:
        """The keys of the shared points: those that are not an option of one method."""
        keys = {key for point in self.shared_points for key in point}
        return [axis for axis in self.axes if axis in keys]

    @property
    def example(self) -> Run:
        """The run whose graph is shown: the reference's with the most clusters, or another's."""
        return min(self.runs, key=self._example_rank)

    def _example_rank(self, run: Run) -> tuple[bool, int]:
        mixture = run.result["clients"]["mixture"]
        return run.method != self.reference, -len(mixture[0]) if mixture else 0

    @property
    def alarms(self) -> list[str]:
        return [f"{run.label}: {alarm}" for run in self.runs for alarm in run.result["alarms"]]


def compare_runs(
    runs: Sequence[Run], reference: str, notes: Sequence[str] = (), target: float | None = None
) -> Comparison:
    """Summarise comparable runs, with each method's difference to the reference method.

    The target is by default 95 % of the way to the best.
    """
    score = runs[0].score
    target = _default_target(runs, score) if target is None else target
    points = distinct_points(run.point for run in runs)
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in _in_order(runs):
        groups.setdefault((run.method, canonical_json(run.point)), []).append(run)
    # A method that runs with several values of its own options stands here with the first ones.
    first: dict[tuple[str, str], list[Run]] = {}
    for (method, _), group in groups.items():
        first.setdefault((method, canonical_json(group[0].shared_point)), group)
    rows = []
    for (method, _), group in groups.items():
        opponents = first.get((reference, canonical_json(group[0].shared_point)))
        alone = first.get((ALONE, canonical_json(group[0].shared_point)))
        rows.append(
            _summarise(
                group,
                None if group is opponents else opponents,
                None if method == ALONE else alone,
                score,
                target,
            )
        )
    axes = list(dict.fromkeys(key for point in points for key in point))
    return Comparison(list(runs), rows, reference, axes, list(notes), score, target)


def _in_order(runs: Sequence[Run]) -> list[Run]:
    """Sort by shared point, then by method, then by point, each as it comes first."""

    def ranks(names: Sequence[str]) -> list[int]:
        first = {name: rank for rank, name in enumerate(dict.fromkeys(names))}
        return [first[name] for name in names]

    keys = zip(
        ranks([canonical_json(run.shared_point) for run in runs]),
        ranks([run.method for run in runs]),
        ranks([canonical_json(run.point) for run in runs]),
        range(len(runs)),
        strict=True,
    )
    return [runs[key[-1]] for key in sorted(keys)]


def _summarise(
    runs: list[Run],
    opponents: list[Run] | None,
    alone: list[Run] | None,
    score: Score,
    target: float | None,
) -> MethodRow:
    results, name = [run.result for run in runs], score.name
    newcomers = [result["newcomers"] for result in results if result.get("newcomers")]
    own, other = ({run.seed: _mean_of(run, name) for run in g} for g in (runs, opponents or ()))
    spreads = [run.spread(name) for run in runs]
    steps = _average([result["steps"] for result in results])
    return MethodRow(
        method=runs[0].method,
        point=runs[0].point,
        seeds=[run.seed for run in runs],
        score=confidence_interval(list(own.values())),
        difference=paired_difference(own, other) if opponents else None,
        std=mean([spread.get("std") for spread in spreads]),
        worst=mean([spread.get("worst") for spread in spreads]),
        before=confidence_interval(
            [run.spread(name, "_before_final_phase").get("mean") for run in runs]
        ),
        test_loss=confidence_interval([mean(result["clients"]["test_loss"]) for result in results]),
        metrics={
            other.name: confidence_interval([_mean_of(run, other.name) for run in runs])
            for other in OTHER_SCORES
            if any(run.spread(other.name) for run in runs)
        },
        target=None if target is None else _cost_of_target(runs, target),
        classes=_average_named(results, "classes"),
        distributions=_average_named(results, "distributions"),
        worst_distribution=_average_of_distributions(results, "worst"),
        smallest_distribution=_average_of_distributions(results, "smallest"),
        hurt=_share_of_hurt_clients(runs, alone, score) if alone else None,
        clusters=_clusters(results),
        purity=mean([result["purity"] for result in results]),
        adjusted_rand_index=mean([result.get("adjusted_rand_index") for result in results]),
        newcomers=confidence_interval([mean_score(joined, name) for joined in newcomers]),
        newcomers_loss=confidence_interval([mean(joined["test_loss"]) for joined in newcomers]),
        multicast=_average([result["bytes"]["multicast"] for result in results]),
        point_to_point=_average([result["bytes"]["point_to_point"] for result in results]),
        models=_average([result["models_sent"] for result in results]),
        steps=steps,
        steps_ratio=steps / _average([run.local_update_steps for run in runs]),
        seconds=_average([result["seconds"] for result in results]),
        curve=_average_curve(runs, name),
        clients=[result["clients"].get(name) or [] for result in results],
    )


def _mean_of(run: Run, name: str) -> float | None:
    """Return the mean of a score over clients."""
    if name == TEST_LOSS.name:
        return mean(run.result["clients"]["test_loss"])
    return run.spread(name).get("mean")


def mean_score(scores: Json, name: str) -> float | None:
    """Return the mean of a score of newcomers: a spread, or one number for each."""
    found = scores.get(name) or []
    return found["mean"] if isinstance(found, dict) else mean(found)


def _default_target(runs: Sequence[Run], score: Score) -> float | None:
    """Return a score that is nearly the best run's, in two digits that people can read."""
    known = [m for run in runs if (m := _mean_of(run, score.name)) is not None]
    if not known:
        return None
    if score.is_error:
        return float(f"{min(known) / TARGET_SHARE:.2g}")
    return math.floor(100 * TARGET_SHARE * max(known)) / 100


def _cost_of_target(runs: list[Run], target: float) -> Target:
    found = [entry for run in runs if (entry := reach(run.history, target)) is not None]
    return Target(len(found), *(mean([entry[cost] for entry in found]) for cost in COSTS))


def _clusters(results: Sequence[Json]) -> tuple[int, ...]:
    """Return the different numbers of clusters that some runs found."""
    found = (result.get("clusters") for result in results)
    return tuple(sorted({number for number in found if number is not None}))


def _average_named(results: list[Json], field: str) -> dict[str, float | None]:
    """Return the mean accuracy on each class or distribution; none if a run lacks them."""
    records = [result.get(field) for result in results]
    if None in records:
        return {}
    scores = zip(*(record["accuracy"] for record in records if record), strict=True)
    names = records[0]["names"] if records[0] else []
    return {name: mean(values) for name, values in zip(names, scores, strict=True)}


def _average_of_distributions(results: list[Json], name: str) -> float | None:
    return mean([(result.get("distributions") or {}).get(name) for result in results])


def _share_of_hurt_clients(runs: list[Run], alone: list[Run], score: Score) -> float | None:
    """Return the share of clients with a worse score than alone, paired by seed and client."""
    own, other = ({run.seed: client_scores(run, score) for run in group} for group in (runs, alone))
    pairs = [
        pair for seed in own if seed in other for pair in zip(own[seed], other[seed], strict=True)
    ]
    return mean([float(score < score_alone) for score, score_alone in pairs])


def client_scores(run: Run, score: Score) -> list[float]:
    """Return every client's score, an error with a minus sign: more is better.

    One that is not finite is worse than any other.
    """
    sign = -1.0 if score.is_error else 1.0
    return [-math.inf if s is None else sign * s for s in run.result["clients"][score.name]]


def _average(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _average_curve(runs: list[Run], name: str) -> ScoreCurve:
    histories = [{e["round"]: e for e in run.history if e["event"] == "round"} for run in runs]
    rounds = [round for round in histories[0] if all(round in history for history in histories)]
    by_round = [[history[round] for history in histories] for round in rounds]
    scores = [confidence_interval([entry.get(name) for entry in seeds]) for seeds in by_round]
    sums = (
        [_average([entry[cost] for entry in seeds]) for seeds in by_round]
        for cost in ("bytes", "seconds", "steps")
    )
    return ScoreCurve(rounds, scores, *sums)


def score_along(comparison: Comparison, axis: str) -> dict[str, dict[str, ScoreLine]]:
    """Return the score by value of this axis: panel -> label -> line.

    The shared point on the other axes is the panel; the method and its own options are the label.
    """
    panels: dict[str, dict[str, ScoreLine]] = {}
    for row in comparison.rows:
        if axis in row.point:
            rest = {key: value for key, value in row.point.items() if key != axis}
            shared = without_own_options(row.method, rest)
            own = {key: value for key, value in rest.items() if key not in shared}
            panel = panels.setdefault(format_point(shared), {})
            line = panel.setdefault(format_label(row.method, own), [])
            line.append((row.point[axis], row.score))
    return panels
