"""The measurement of attacks: it goes on where it stopped, and its table shows every seed."""

import json
from pathlib import Path
from typing import Any

import pytest

from chaos import attacks
from chaos.attacks import FLIP, Case

DOCS = Path(__file__).parents[2] / "docs"
CASE = Case("sign flip", "fedspd", FLIP, ("uniform", "median"))


def test_run_plays_only_what_is_not_known_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Any] = []

    def play(case: Case, degree: str, rule: str, seed: int, is_honest: bool) -> float:
        played.append((degree, rule, seed, is_honest))
        return 0.75 if is_honest else 0.5

    monkeypatch.setattr(attacks, "play", play)
    first = list(attacks.run([CASE], ["3"], 1))
    assert [(row["rule"], row["accuracy"], row["honest"]) for row in first] == [
        ("uniform", 0.5, 0.75),
        ("median", 0.5, 0.75),
    ]
    played.clear()
    again = list(attacks.run([CASE], ["3"], 2, first[:1]))
    assert [(row["rule"], row["seed"]) for row in again] == [
        ("median", 0), ("uniform", 1), ("median", 1),
    ]  # fmt: skip
    assert len(played) == 6  # each with a run without the lie


def test_table_shows_the_mean_over_seeds_and_its_standard_error() -> None:
    about = {"case": "sign flip", "rule": "median", "degree": "6", "honest": 0.8}
    rows = [{**about, "seed": seed, "accuracy": 0.7 - 0.1 * seed} for seed in range(2)]
    line = attacks.render(rows).splitlines()[-1]
    assert line == "| sign flip | `median` | – | 15.0 ± 5.0 (80.0 %) | – |"


def test_table_of_the_docs_shows_all_results() -> None:
    rows = json.loads((DOCS / "attacks.json").read_text())
    assert attacks.render(rows) in (DOCS / "security.md").read_text()
