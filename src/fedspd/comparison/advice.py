"""Say which method fits the data of a comparison, why, and how sure that is.

Three signs speak: the spectrum of fedspd-split (are there populations?), the clients' label counts
(are they skewed?), and what sharing is worth against local-only training. The scores decide where
they contradict these.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspd.algorithms.populations import LEAST_RATIO, largest_gap
from fedspd.comparison.jobs import FINETUNE
from fedspd.config import ExperimentConfig, given_dict, validate
from fedspd.experiment.build import build_experiment
from fedspd.reporting.method_rows import ALONE, client_scores
from fedspd.reporting.points import distinct_points, format_label
from fedspd.reporting.runs import Run
from fedspd.reporting.statistics import Interval, confidence_interval

SPLIT, FEDAVG = "fedspd-split", "fedavg"
NEEDED = (SPLIT, FEDAVG, ALONE)  # the methods that advice needs
ROUNDS = 10
NOTABLE_SKEW = 0.1  # distance of label shares beyond that of chance
CLEAR_MARGIN = 1.5  # factor between the eigenvalues' ratio and its threshold

Scores = dict[str, NDArray[np.float64]]  # by name of the row: seeds x clients, more is better


@dataclass(frozen=True)
class Signs:
    """What the runs say of the data; None where it is unknown.

    clusters   the number of populations that most seeds find
    ratio      of two eigenvalues in a row, the largest: of the seed nearest to the threshold
    skew       mean distance of a client's label shares to the network's: 0 to 1
    chance     the distance that random draws of the labels would have
    """

    clusters: int | None = None
    ratio: float | None = None
    skew: float | None = None
    chance: float | None = None

    @property
    def is_skewed(self) -> bool:
        return bool(self.skew and self.chance and self.skew > self.chance + NOTABLE_SKEW)

    @property
    def is_overruled(self) -> bool:
        """Whether the ratio speaks for populations, but one head serves them better."""
        return self.clusters == 1 and self.ratio is not None and self.ratio >= LEAST_RATIO

    @property
    def is_clear(self) -> bool:
        """Whether the ratio decided, and is far from its threshold."""
        if self.ratio is None or self.is_overruled:
            return False
        return _margin(self.ratio) >= CLEAR_MARGIN


@dataclass(frozen=True)
class Advice:
    """The method that fits the data, with the numbers behind it."""

    method: str
    sureness: str
    sentence: str
    signs: Signs
    sharing: Interval | None  # what the best method that shares gains over local-only training
    lead: Interval | None  # over the next best method
    next_best: str | None


def shorten(config: ExperimentConfig) -> ExperimentConfig:
    """Return the config with the few rounds that advice needs, tested at the end alone."""
    tree = given_dict(config)
    rounds = max(ROUNDS, tree[SPLIT]["warmup"] + 1)
    return validate({**tree, "rounds": rounds, "evaluate_every": rounds})


def training_labels(config: ExperimentConfig) -> Sequence[Tensor]:
    """Return the labels of every client's training examples."""
    return build_experiment(config).plan.train.y


def advise(runs: Sequence[Run], labels: Sequence[Tensor]) -> Advice | None:
    """Return advice from runs at one point; None if there are no two methods to compare.

    `labels` are those of the clients' training examples.
    """
    scores = _scores(runs)
    if len(distinct_points(run.shared_point for run in runs)) > 1 or len(scores) < 2:
        return None
    if len(labels) == 1:
        reason = "there is one client, and nobody to share with"
        return Advice(ALONE, "Sure", f"{ALONE} fits these data: {reason}.", Signs(), *[None] * 3)
    signs = read_signs(runs, labels)
    best = {name: float(score.mean()) for name, score in scores.items()}
    gains = _gains(scores, best)
    sharing = confidence_interval(gains) if gains else None
    method = _choose(scores, best, signs, gains)
    # With one population, fedspd-split is FedAvg with a prior: no other answer, so no rival.
    equal = {SPLIT} if method == FEDAVG and signs.clusters == 1 else set()
    rivals = {name: mean for name, mean in best.items() if name not in equal | {method}}
    rival = max(rivals, key=rivals.__getitem__, default=None)
    lead = confidence_interval(_differences(scores[method], scores[rival])) if rival else None
    sureness = _sureness(method, signs, lead)
    words = _Words(runs, *next(iter(scores.values())).shape)
    reasons = [_spectrum_in_words(signs), _skew_in_words(signs), words.sharing(sharing)]
    prior = "" if signs.skew is None else " with a label prior"  # a regression has no labels
    equally = f" ({SPLIT} then is FedAvg{prior})" if equal & set(scores) else ""
    sentence = (
        f"{method} fits these data{equally}: {_enumerate(reasons)}. "
        f"{sureness}{words.evidence(signs, lead, rival)}."
    )
    return Advice(method, sureness, sentence, signs, sharing, lead, rival)


# ---- the signs


def read_signs(runs: Sequence[Run], labels: Sequence[Tensor]) -> Signs:
    """Return the signs from the records of fedspd-split and from the clients' labels."""
    found = [run.result for run in runs if run.method == SPLIT and run.result.get("spectrum")]
    skew, chance = label_skew(labels)
    if not found:
        return Signs(skew=skew, chance=chance)
    clients = runs[0].config["clients"]
    gaps = [largest_gap(torch.tensor([result["spectrum"]]), clients) for result in found]
    clusters = Counter(int(result["clusters"]) for result in found).most_common(1)[0][0]
    ratio = min((float(ratio) for _, ratio in gaps), key=_margin)
    return Signs(clusters, ratio or None, skew, chance)


def label_skew(labels: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """Return the mean total variation distance of label shares to the network's, and by chance.

    A distance of 0.4 says: 40 % of a client's examples would need another label to have the
    network's shares. By chance is the expectation if every label were drawn from these shares.
    """
    if labels[0].is_floating_point():
        return None, None
    classes = 1 + max(int(own.max()) for own in labels)
    count_CK = np.array([np.bincount(own.numpy(), minlength=classes) for own in labels], float)
    n_C1 = count_CK.sum(1, keepdims=True)
    share_K = count_CK.sum(0) / count_CK.sum()
    distance_CK = np.abs(count_CK / n_C1 - share_K)
    chance_CK = np.sqrt(2 * share_K * (1 - share_K) / (math.pi * n_C1))  # of a normal deviate
    return float(distance_CK.sum(1).mean() / 2), float(chance_CK.sum(1).mean() / 2)


def _margin(ratio: float) -> float:
    """Return the factor by which the ratio is above or below its threshold."""
    factor = max(ratio, 1e-9) / LEAST_RATIO
    return max(factor, 1 / factor)


# ---- the scores


def _scores(runs: Sequence[Run]) -> Scores:
    """Return every method's scores in the seeds that all have; an error counts negative."""
    by_name: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        scores = client_scores(run, run.score)
        if all(map(math.isfinite, scores)):
            point = {k: v for k, v in run.point.items() if (k, v) != (FINETUNE, 0)}
            by_name.setdefault(format_label(run.method, point), {})[run.seed] = scores
    seeds = [set(by_seed) for by_seed in by_name.values()]
    shared = sorted(set.intersection(*seeds)) if seeds else []
    if not shared:
        return {}
    return {name: np.array([own[s] for s in shared], float) for name, own in by_name.items()}


def _differences(own: NDArray[np.float64], other: NDArray[np.float64]) -> list[float]:
    """Return own minus other: of every seed, or of every client of a single seed."""
    difference_SC = own - other
    numbers = difference_SC.mean(1) if len(difference_SC) > 1 else difference_SC[0]
    return [float(number) for number in numbers]


def _gains(scores: Scores, best: dict[str, float]) -> list[float]:
    """Return what the best method that shares gains over local-only training."""
    others = {name: mean for name, mean in best.items() if name != ALONE}
    if ALONE not in best or not others:
        return []
    return _differences(scores[max(others, key=others.__getitem__)], scores[ALONE])


def _choose(scores: Scores, best: dict[str, float], signs: Signs, gains: list[float]) -> str:
    """Return the method that the signs speak for, unless another one is clearly ahead of it.

    Sharing must gain more than the standard error of the gain.
    """
    if gains and np.mean(gains) <= np.std(gains) / math.sqrt(max(len(gains) - 1, 1)):
        return ALONE
    first = max(best, key=best.__getitem__)
    expected = FEDAVG if signs.clusters == 1 and not signs.is_skewed else SPLIT
    if signs.clusters is None or expected not in best:
        return first
    ahead = confidence_interval(_differences(scores[first], scores[expected]))
    return first if _is_clear(ahead) else expected


def _is_clear(difference: Interval | None) -> bool:
    """Return whether the difference is positive beyond its interval."""
    if difference is None or difference.mean is None or difference.half is None:
        return False
    return difference.mean > difference.half


# ---- the words


def _sureness(method: str, signs: Signs, lead: Interval | None) -> str:
    """Return how many of the two grounds hold: a clear lead, and a clear spectrum."""
    if method == ALONE and not _is_clear(lead):  # the spectrum alone says nothing for it
        return "Not sure"
    return ("Not sure", "Fairly sure", "Sure")[_is_clear(lead) + signs.is_clear]


def _spectrum_in_words(signs: Signs) -> str:
    if signs.clusters is None:
        return "no populations were looked for"
    found = "no populations stand out"
    if signs.clusters > 1:
        found = f"they come from {signs.clusters} populations"
    if signs.ratio is None:
        return found
    ratio = f"(ratio of eigenvalues {signs.ratio:.1f}, threshold {LEAST_RATIO:.1f})"
    if signs.is_overruled:
        return f"clients differ {ratio}, but their features tell it: one head serves them all"
    return f"{found} {ratio}"


def _skew_in_words(signs: Signs) -> str | None:
    if signs.skew is None:
        return None
    kind = "skewed" if signs.is_skewed else "not skewed"
    return f"their labels are {kind} (distance {signs.skew:.2f}, by chance {signs.chance:.2f})"


def _enumerate(parts: Sequence[str | None]) -> str:
    *first, last = [part for part in parts if part]
    return f"{', '.join(first)}, and {last}" if first else last


@dataclass(frozen=True)
class _Words:
    """The words for differences between scores."""

    runs: Sequence[Run]
    seeds: int
    clients: int

    def _amount(self, difference: Interval) -> str:
        """Return 3.1 ± 0.4 points, or an amount of RMSE, without its sign."""
        assert difference.mean is not None
        numbers = [abs(difference.mean)] + ([difference.half] if difference.half else [])
        score = self.runs[0].score
        unit = "points" if score.is_percent else f"of {score.title}"
        return f"{' ± '.join(map(score.half, numbers))} {unit}"

    def sharing(self, gain: Interval | None) -> str | None:
        if gain is None or gain.mean is None:
            return None
        verb = "is worth" if gain.mean > 0 else "costs"
        return f"sharing {verb} {self._amount(gain)} against local-only training"

    def evidence(self, signs: Signs, lead: Interval | None, rival: str | None) -> str:
        """Return the numbers that the sureness rests on."""
        parts: list[str | None] = []
        if lead is not None and lead.mean is not None:
            side = "ahead of" if lead.mean >= 0 else "behind"
            over = f"{self.seeds} seeds" if self.seeds > 1 else f"{self.clients} clients"
            interval = f" (95 % interval over {over})" if lead.half else ""
            parts.append(f"it is {self._amount(lead)} {side} {rival}{interval}")
        if signs.ratio is not None and not signs.is_overruled:
            side = "above" if signs.ratio >= LEAST_RATIO else "below"
            parts.append(f"the ratio is a factor {_margin(signs.ratio):.1f} {side} its threshold")
        return f": {_enumerate(parts)}" if parts else ""
