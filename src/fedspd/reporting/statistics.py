"""What several runs say together: pure functions from records to plain numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from fedspd.reporting.runs import Numbers, Run, canonical, distinct, label, mean, shared, spot
from fedspd.storage.atomic import Json

REFERENCE = "fedspd"  # what every method is compared to
BUDGET = "fedavg"  # whose gradient steps are the measure: one model, no final phase
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, and how far its 95 % interval reaches to either side: not known of a single number."""

    mean: float | None
    half: float | None


@dataclass(frozen=True)
class Curve:
    rounds: list[int]
    accuracy: list[Interval]
    bytes: list[float]


@dataclass(frozen=True)
class MethodRow:
    """One method at one point, over all its seeds. Counts, bytes and seconds are means over seeds."""

    method: str
    point: Json
    seeds: list[int]
    accuracy: Interval
    difference: Interval | None  # to FedSPD, seed by seed
    spread: float | None
    worst: float | None
    before: Interval  # the final phase
    test_loss: Interval
    purity: (
        float | None
    )  # of the clusters, where the method assigns examples and there are several distributions
    newcomers: Interval  # accuracy of clients that joined after training
    newcomers_loss: Interval
    multicast: float
    point_to_point: float
    models: float
    steps: float
    steps_ratio: float | None  # to FedAvg's
    seconds: float
    curve: Curve
    clients: list[list[float | None]]  # accuracy by seed and client

    @property
    def label(self) -> str:
        return label(self.method, self.point)

    @property
    def shared_point(self) -> Json:
        return shared(self.method, self.point)


@dataclass(frozen=True)
class Comparison:
    runs: list[Run]
    rows: list[MethodRow]
    axes: list[str]
    notes: list[str]  # what was left out, and why

    @property
    def points(self) -> list[Json]:
        """Where methods meet."""
        return distinct(row.shared_point for row in self.rows)

    @property
    def example(self) -> Run:
        """The run whose graph is shown: FedSPD's first, else the first that has mixtures, else the first."""
        return min(
            self.runs,
            key=lambda run: (run.method != REFERENCE, run.result["clients"]["mixture"] is None),
        )

    @property
    def alarms(self) -> list[str]:
        return [f"{run.label}: {alarm}" for run in self.runs for alarm in run.result["alarms"]]


def compare(runs: list[Run], notes: Sequence[str] = ()) -> Comparison:
    points = distinct(run.point for run in runs)
    places = {canonical(point): place for place, point in enumerate(points)}
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: places[canonical(run.point)]):
        groups.setdefault((canonical(run.point), run.method), []).append(run)

    def reference(group: list[Run]) -> list[Run] | None:
        """What FedSPD did at the same point, if it had no options of its own there."""
        return groups.get((canonical(group[0].shared_point), REFERENCE))

    def budget(group: list[Run]) -> list[Run]:
        """What FedAvg did at the same point; with options of its own there, those that cost least: no final phase."""
        point = canonical(group[0].shared_point)
        there = [
            other
            for (_, method), other in groups.items()
            if method == BUDGET and canonical(other[0].shared_point) == point
        ]
        return min(
            there, key=lambda other: _known([run.result["steps"] for run in other]), default=[]
        )

    rows = [_row(group, reference(group), budget(group)) for group in groups.values()]
    axes = list(dict.fromkeys(key for point in points for key in point))
    return Comparison(runs, rows, axes, list(notes))


def _row(runs: list[Run], reference: list[Run] | None, budget: list[Run]) -> MethodRow:
    results = [run.result for run in runs]
    steps, usual = (
        mean([result["steps"] for result in results]),
        mean([run.result["steps"] for run in budget]),
    )
    is_reference = runs[0].method == REFERENCE
    newcomers = [result["newcomers"] for result in results if result.get("newcomers")]
    return MethodRow(
        method=runs[0].method,
        point=runs[0].point,
        seeds=[run.seed for run in runs],
        accuracy=interval([result["accuracy"]["mean"] for result in results]),
        difference=None
        if is_reference or not reference
        else paired(_by_seed(runs), _by_seed(reference)),
        spread=mean([result["accuracy"]["std"] for result in results]),
        worst=mean([result["accuracy"]["worst"] for result in results]),
        before=interval([result["accuracy_before_final_phase"]["mean"] for result in results]),
        test_loss=interval([mean(result["clients"]["test_loss"]) for result in results]),
        purity=mean([result["purity"] for result in results]),
        newcomers=interval([joined["accuracy"]["mean"] for joined in newcomers]),
        newcomers_loss=interval([mean(joined["test_loss"]) for joined in newcomers]),
        multicast=_known([result["bytes"]["multicast"] for result in results]),
        point_to_point=_known([result["bytes"]["point_to_point"] for result in results]),
        models=_known([result["models_sent"] for result in results]),
        steps=steps or 0.0,
        steps_ratio=steps / usual if steps and usual else None,
        seconds=_known([result["seconds"] for result in results]),
        curve=_curve(runs),
        clients=[result["clients"]["accuracy"] for result in results],
    )


def _by_seed(runs: list[Run]) -> dict[int, float | None]:
    return {run.seed: run.result["accuracy"]["mean"] for run in runs}


def _known(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def interval(numbers: Numbers) -> Interval:
    """The mean with its 95 % interval by Student's t; nothing where a number is missing."""
    if not numbers or None in numbers:
        return Interval(None, None)
    values = np.array(numbers, dtype=float)
    n = len(values)
    half = (
        float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * values.std(ddof=1) / math.sqrt(n))
        if n > 1
        else None
    )
    return Interval(float(values.mean()), half)


def paired(one: dict[int, float | None], other: dict[int, float | None]) -> Interval:
    """one - other over the seeds that both have."""
    pairs = [(one[seed], other[seed]) for seed in one if seed in other]
    return interval([None if a is None or b is None else a - b for a, b in pairs])


def _curve(runs: list[Run]) -> Curve:
    """Over the rounds that every seed has tested."""
    histories = [{moment.round: moment for moment in run.history} for run in runs]
    rounds = [round for round in histories[0] if all(round in history for history in histories)]
    accuracy = [interval([history[round].accuracy for history in histories]) for round in rounds]
    return Curve(
        rounds,
        accuracy,
        [_known([history[round].bytes for history in histories]) for round in rounds],
    )


def lines(comparison: Comparison, axis: str) -> dict[str, dict[str, list[tuple[Any, Interval]]]]:
    """The accuracy along one axis: a panel for each point of the other axes, with a line for each method and its own options."""
    found: dict[str, dict[str, list[tuple[Any, Interval]]]] = {}
    for row in comparison.rows:
        if axis in row.point:
            rest = {key: value for key, value in row.point.items() if key != axis}
            place = shared(row.method, rest)
            own = {key: value for key, value in rest.items() if key not in place}
            found.setdefault(spot(place), {}).setdefault(label(row.method, own), []).append(
                (row.point[axis], row.accuracy)
            )
    return found
