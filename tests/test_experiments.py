"""The scripts of docs/results.md, on small data."""

import json
from pathlib import Path

import pytest
import torch

import bytes_sent
import clusters_found
import fedspd
import fedspd_centers
import map_runs
import map_tables
import split_choices
from fedspd.algorithms import fedspd_split, populations
from fedspd.config import validate
from fedspd.experiment.build import build_experiment

SMALL = {
    "clients": 4,
    "rounds": 3,
    "data": {"examples": 60},
    "topology": {"degree": 2},
    "method": "fedspd",
    "fedspd": {"final_epochs": 1},
}


def test_centers_are_scored_by_the_state_before_the_final_phase() -> None:
    summary = fedspd.run(SMALL).summary
    (blend, _, _, final), (major, truth, label) = fedspd_centers.train(
        build_experiment(validate(SMALL))
    )
    assert blend == pytest.approx(summary["accuracy_before_final_phase"]["mean"], abs=1e-9)
    assert final == pytest.approx(summary["accuracy"]["mean"], abs=1e-9)
    assert 0.5 <= major <= min(truth, label) <= 1


def test_majority_share_counts_examples_beside_most_of_their_kind() -> None:
    assigned = torch.tensor([0, 0, 1, 1, 1, 0])
    assert fedspd_centers.majority_share(assigned, torch.zeros(6, dtype=torch.long)) == 3 / 6
    assert fedspd_centers.majority_share(assigned, torch.tensor([7, 7, 7, 8, 8, 8])) == 4 / 6
    assert fedspd_centers.majority_share(assigned, torch.tensor([5, 5, 6, 6, 6, 5])) == 1


def test_informed_has_every_example_in_its_true_cluster_after_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    correct = fedspd_centers.Informed.with_true_clusters
    monkeypatch.setattr(
        fedspd_centers.Informed,
        "with_true_clusters",
        lambda self, state, data: seen.append(correct(self, state, data)) or seen[-1],
    )
    experiment = fedspd_centers.informed(build_experiment(validate({**SMALL, "rounds": 2})))
    _, (_, truth_share, _) = fedspd_centers.train(experiment)
    assert truth_share == 1
    assert len(seen) == 3  # the start and two rounds
    truths = experiment.plan.truth
    for state in seen:
        for row_E, truth, u_S in zip(state.assignment_CE, truths, state.mixture_CS, strict=True):
            assert row_E[: len(truth)].tolist() == truth.tolist()
            assert u_S.tolist() == pytest.approx([(truth == s).mean() for s in range(2)])


# ---- the map


def record(method: str, seed: int, accuracy: float, **more: object) -> dict[str, object]:
    place = {"part": "a", "data": "mnist", "world": "iid", "degree": 3, "clients": 20}
    found = {"clusters": 1 if method == "fedspd-split" else None, "purity": None}
    numbers = {"examples": 300, "seed": seed, "method": method, "accuracy": accuracy}
    return {**place, **numbers, **found, **more}


def test_map_marks_the_best_and_pairs_differences_by_seed(tmp_path: Path) -> None:
    """Split is 1 and 3 points ahead: 2 +- 12.7 by Student's t with one degree of freedom."""
    scores = {("fedspd-split", 0): 81, ("fedspd-split", 1): 93}
    scores |= {("fedavg", 0): 80, ("fedavg", 1): 90}
    records = [record(method, seed, value) for (method, seed), value in scores.items()]
    (tmp_path / "a.json").write_text(json.dumps(records))
    page = tmp_path / "results.md"
    page.write_text("before\n<!-- map: a -->\nold\n<!-- end -->\nafter\n")
    map_tables.main(page, tmp_path)
    assert "| iid | **87.0** (S = 1) | 85.0 | +2.0 ± 12.7 |" in page.read_text()
    assert "old" not in page.read_text()
    assert page.read_text().endswith("<!-- end -->\nafter\n")


def test_map_shows_seeds_and_worlds_that_are_complete() -> None:
    done = [
        record(m, 0, 80, world=w) for m in ("fedspd-split", "fedavg") for w in ("iid", "parity")
    ]
    half = [record("fedavg", 2, 80), record("fedavg", 0, 80, world="rotation")]
    assert map_tables.complete([*done, *half], 2) == done  # not every method has run there
    assert map_tables.seeds_in_words(done) == "1 seed"
    more = [record("fedavg", 1, 80), record("fedspd-split", 1, 80)]
    assert map_tables.complete([*done, *more, *half], 2) == [*done, *more]
    assert map_tables.seeds_in_words([*done, *more]) == "2 seeds; 1 where the interval is missing"


def test_map_runs_what_is_missing_and_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"clients": 4, "rounds": 2, "data": {"examples": 20, "test_examples": 5}}
    base |= {"model": {"name": "mlp"}, "training": {"epochs": 1}}

    def cells() -> list[map_runs.Cell]:
        rows = ("fedspd-split", "fedavg")
        return [map_runs.cell("x", base, "digits", "iid", 2, 0, row) for row in rows]

    monkeypatch.setitem(map_runs.PARTS, "x", cells)
    map_runs.run_part("x", 1, tmp_path)
    records = json.loads((tmp_path / "x.json").read_text())
    assert [one["method"] for one in records] == ["fedspd-split", "fedavg"]
    kept = {**records[0], "accuracy": 12.5}
    (tmp_path / "x.json").write_text(json.dumps([kept]))
    map_runs.run_part("x", 1, tmp_path)
    again = json.loads((tmp_path / "x.json").read_text())
    assert again[0] == kept
    assert again[1]["accuracy"] == records[1]["accuracy"]
    (tmp_path / "x.json").write_text(json.dumps([kept, {**records[1], "accuracy": 12.5}]))
    map_runs.run_again("x", "fedspd-split", 1, tmp_path)
    changed = json.loads((tmp_path / "x.json").read_text())
    assert changed[0]["accuracy"] == records[0]["accuracy"], "of this method all run again"
    assert changed[1]["accuracy"] == 12.5, "and of no other"
    assert not (tmp_path / "x-again.json").exists()


def test_table_of_clusters_counts_right_runs_and_names_the_others() -> None:
    size = {"clients": 100, "examples": 20, "degree": 6}
    records = [{"world": "labellings, mixed", "clusters": S, **size} for S in (2, 2, 1, 3)]
    lines = clusters_found.table(records)
    assert "| labellings, mixed | 2 |  |  |  |  | 2 of 4 (1 x S = 1, 1 x S = 3) |  |" in lines
    assert lines[-1] == "Right in 2 of 4 runs."
    cells = list(clusters_found.cells(1))
    assert len(cells) == 120
    assert all(validate(one.config).method == "fedspd-split" for one in cells)


def test_choice_is_changed_for_its_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        map_runs, "run_cell", lambda one: (populations.LENGTH, fedspd_split.V_RATE, one)
    )
    one, _ = next(split_choices.cells())
    before = populations.LENGTH, fedspd_split.V_RATE, one
    assert split_choices.run(one, {"LENGTH": 3.0, "V_RATE": 0.7}) == (3.0, 0.7, one)
    assert split_choices.run(one, {}) == before


def test_choices_are_shown_as_differences_to_the_method_as_it_is() -> None:
    size = {"clients": 20, "data": "mnist", "world": "labellings, pure"}
    scores = {"as it is": 80, "first D a third as long": 77.5}
    records = [{**size, "choice": name, "accuracy": score} for name, score in scores.items()]
    lines = split_choices.accuracies(records)
    assert "| as it is |  | 80.0 |  |  |" in lines
    assert "| first D a third as long |  | −2.5 |  |  |" in lines
    many = {**size, "clients": 100, "choice": "as it is", "accuracy": 0}
    found = split_choices.searches([{**many, "clusters": S} for S in (2, 1)])
    assert "| as it is |  |  |  | 1 of 2 |  |" in found


def test_signed_eigenvalues_find_two_labellings() -> None:
    base = {"clients": 8, "rounds": 2, "data": {"examples": 60, "test_examples": 5}}
    base |= {"model": {"name": "mlp"}, "training": {"epochs": 1}, "fedspd-split": {"warmup": 1}}
    one = map_runs.cell("x", base, "digits", "labellings, pure", 6, 0, "fedspd-split")
    assert split_choices.run(one, split_choices.SEARCHES["v'Av, ratio 1.8"])["clusters"] == 2


def test_bytes_of_split_and_fedavg_are_counted_in_the_same_setting() -> None:
    for world, _, more in bytes_sent.FORMS:
        split = validate(
            bytes_sent.setting(world, "fedspd-split", {**bytes_sent.NO_FINAL_PHASE, **more})
        )
        plain = validate(bytes_sent.setting(world, "fedavg", {}))
        assert (split.method, plain.method) == ("fedspd-split", "fedavg")
        assert (split.data, split.topology, split.rounds) == (plain.data, plain.topology, 30)


def _map_configs(*rows: str) -> list[map_runs.Tree]:
    base = {"clients": 4, "rounds": 3, "data": {"examples": 40, "test_examples": 20}}
    base |= {"model": {"name": "mlp"}, "training": {"epochs": 1}}
    return [map_runs.cell("x", base, "digits", "iid", 2, 0, row).config for row in rows]


def test_map_trains_every_method_that_has_no_final_phase() -> None:
    """They share no rounds with each other, though none has rounds that another one could take."""
    configs = _map_configs("ifca", "facade", "fedrep")
    found = [map_runs.train(config).summary for config in configs]
    assert [one["method"] for one in found] == ["ifca", "facade", "fedrep"]
    assert len({one["hash"] for one in found}) == 3


def test_map_shares_the_rounds_of_rows_that_differ_in_their_final_phase() -> None:
    configs = _map_configs("fedavg", "fedavg, fine-tuned", "fedavg, half-way")
    shared = [map_runs.train(config) for config in configs]
    assert map_runs.last_run is shared[0], "the others began with its rounds"
    for config, one in zip(configs, shared, strict=True):
        alone = fedspd.run(config).summary
        assert one.summary["hash"] == alone["hash"]
        assert one.summary["accuracy"] == alone["accuracy"]
