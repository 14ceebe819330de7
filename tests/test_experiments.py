"""The scripts of docs/results.md, on small data."""

import json
from pathlib import Path

import pytest
import torch

import bytes_sent
import centers
import clusters_found
import fedspd
import finetune
import informed
import map_runs
import map_tables
from fedspd.comparison.jobs import list_jobs
from fedspd.comparison.scheduler import run_all
from fedspd.config import load, validate

SMALL = {
    "clients": 4,
    "rounds": 3,
    "data": {"examples": 60},
    "topology": {"degree": 2},
    "method": "fedspd",
    "fedspd": {"final_epochs": 1},
}


def test_centers_blend_equals_the_accuracy_before_the_final_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fedspd.run(SMALL, out=tmp_path / "run")
    centers.main([tmp_path / "run"])
    heading, line = (text.split() for text in capsys.readouterr().out.splitlines())
    found = dict(zip(heading, line, strict=True))
    assert float(found["blend"]) == round(
        100 * result.summary["accuracy_before_final_phase"]["mean"], 1
    )
    assert 50 <= float(found["major"]) <= min(float(found["truth"]), float(found["label"])) <= 100


def test_finetune_equals_a_run_with_fine_tuning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_all(list_jobs(validate(SMALL), ["fedspd", "fedavg"], 2), tmp_path / "c", 1)
    finetune.main(tmp_path / "c", 5)
    results = {
        path.parent.name: json.loads(path.read_text())["accuracy"]["mean"]
        for path in (tmp_path / "c").glob("*/result.json")
    }
    tuned = [
        fedspd.run(load(tmp_path / "c" / f"fedavg,seed={s}" / "config.toml", ["fedavg.finetune=5"]))
        for s in (0, 1)
    ]
    after = [result.summary["accuracy"]["mean"] for result in tuned]
    before = [results[f"fedavg,seed={s}"] for s in (0, 1)]
    against = [results[f"fedspd,seed={s}"] for s in (0, 1)]
    assert before != after
    assert capsys.readouterr().out.split()[::3] == [
        f"{50 * sum(before):.1f}",
        f"{50 * sum(after):.1f}",
        f"{50 * (sum(after) - sum(against)):+.1f}".replace("-", "−"),
    ]


def test_majority_share_counts_examples_beside_most_of_their_kind() -> None:
    assigned = torch.tensor([0, 0, 1, 1, 1, 0])
    assert centers.majority_share(assigned, torch.zeros(6, dtype=torch.long)) == 3 / 6
    assert centers.majority_share(assigned, torch.tensor([7, 7, 7, 8, 8, 8])) == 4 / 6
    assert centers.majority_share(assigned, torch.tensor([5, 5, 6, 6, 6, 5])) == 1


def test_informed_has_every_example_in_its_true_cluster_after_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    correct = informed.Informed.with_true_clusters
    monkeypatch.setattr(
        informed.Informed,
        "with_true_clusters",
        lambda self, state, data: seen.append(correct(self, state, data)) or seen[-1],
    )
    (tmp_path / "small.toml").write_text(
        'method = "fedspd"\nclients = 4\n[data]\nexamples = 60\n'
        "[topology]\ndegree = 2\n[fedspd]\nfinal_epochs = 1\n"
    )
    informed.main(tmp_path / "small.toml", ["rounds=2"])
    plan = informed.build_experiment(informed.load(tmp_path / "small.toml", ["rounds=2"])).plan
    assert len(seen) == 3  # the start and two rounds
    for state in seen:
        for row_E, truth, u_S in zip(
            state.assignment_CE, plan.truth, state.mixture_CS, strict=True
        ):
            assert row_E[: len(truth)].tolist() == truth.tolist()
            assert u_S.tolist() == pytest.approx([(truth == s).mean() for s in range(2)])
    assert [word for word in capsys.readouterr().out.split() if word.isalpha()] == [
        "blend",
        "outputs",
        "largest",
        "final",
    ]


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
    started = [record("fedavg", 1, 80), record("fedspd-split", 1, 80), record("fedavg", 2, 80)]
    assert map_tables.complete([*done, *started], 2) == done  # parity is missing in seed 1
    half = [record("fedavg", 0, 80, world="rotation")]
    assert map_tables.complete([*done, *half], 2) == done  # not every method has run there


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


def test_bytes_of_split_and_fedavg_are_counted_in_the_same_setting() -> None:
    for world, _, more in bytes_sent.FORMS:
        split = validate(
            bytes_sent.setting(world, "fedspd-split", {**bytes_sent.NO_FINAL_PHASE, **more})
        )
        plain = validate(bytes_sent.setting(world, "fedavg", {}))
        assert (split.method, plain.method) == ("fedspd-split", "fedavg")
        assert (split.data, split.topology, split.rounds) == (plain.data, plain.topology, 30)
