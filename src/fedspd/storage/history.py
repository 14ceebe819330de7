"""What a run had reached after every round, and what it had cost until then."""

import math
from typing import Any

import numpy as np

from fedspd.core.errors import ConfigError
from fedspd.core.scores import ACCURACY, OTHER_SCORES, RMSE, TEST_LOSS, Score, main_score
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

COSTS = ("round", "bytes", "seconds", "steps")


def history(run_folder: RunFolder) -> list[Json]:
    """Return an entry for every evaluated round, and for the final phase: mean scores and costs.

    Sums over all rounds so far: `bytes` (point-to-point), `seconds` (without tests) and `steps`.
    """
    entries, sent, seconds, steps = [], 0, 0.0, 0
    for event in run_folder.events():
        sent += event["bytes"]["point_to_point"]
        seconds += event["seconds"]["total"]
        steps += event["steps"]
        if "accuracy" in event:
            entry: Json = {"event": event["event"], "round": event["round"]}
            names = [score.name for score in (ACCURACY, TEST_LOSS, RMSE, *OTHER_SCORES)]
            entry |= {name: _mean(event[name]) for name in names if name in event}
            entries.append({**entry, "bytes": sent, "seconds": seconds, "steps": steps})
    return entries


def _mean(scores: list[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return float(np.mean(known)) if known else None


def reach(entries: list[Json], target: float) -> Json | None:
    """Return the first entry whose mean accuracy is at least the target; None: there is none.

    In a regression, it is the first whose mean RMSE is at most the target.
    """
    score = main_score(entries[-1]) if entries else ACCURACY
    _check_target(target, score)
    return next((e for e in entries if _is_reached(score, e.get(score.name), target)), None)


def _check_target(target: Any, score: Score) -> None:
    """Refuse a target that is not a score, such as 80 for an accuracy of 80 %."""
    is_number = isinstance(target, int | float | np.number) and not isinstance(target, bool)
    if not is_number or not 0 <= target <= (1 if score.is_percent else math.inf):
        expected = "a number from 0 to 1, such as 0.9" if score.is_percent else "a number from 0"
        raise ConfigError(f"target = {target!r}: expected {expected}.")


def _is_reached(score: Score, value: float | None, target: float) -> bool:
    return value is not None and not score.is_better(target, value)


def costs(entry: Json | None) -> Json:
    """Return the round of an entry and what it had cost; None of each without an entry."""
    return {name: None if entry is None else entry[name] for name in COSTS}
