"""Reading run folders."""

import pytest

from fedspd.core.errors import StorageError
from fedspd.reporting.runs import read_reference, read_runs
from fedspd.storage.run_folder import RunFolder


def test_read_runs_notes_an_unfinished_run(write_run):
    finished, begun = write_run("a"), write_run("b", "local", finished=False)
    runs, notes = read_runs([finished, begun])
    assert [run.folder for run in runs] == [finished]
    assert notes == [f"'{begun}' is left out: the run is not finished."]


def test_read_runs_rejects_folders_without_a_finished_run(write_run):
    with pytest.raises(StorageError, match="none of the 1 runs is finished"):
        read_runs([write_run("a", finished=False)])


def test_read_runs_counts_many_unfinished_runs_of_a_folder(write_sweep):
    sweep = write_sweep("clusters", [2, 4, 6])
    for result in list(sweep.glob("clusters=[46],*/result.json")):
        result.unlink()
    _, notes = read_runs([sweep])
    assert notes == [f"4 runs in '{sweep}' are left out: they are not finished."]


def test_read_runs_rejects_a_folder_that_is_not_a_run(write_run, tmp_path):
    with pytest.raises(StorageError, match="not a run folder; expected"):
        read_runs([write_run("a"), tmp_path])


def test_local_update_steps_count_batches_epochs_and_rounds(write_run):
    """4 examples in batches of 3 are 2 steps; 5 epochs in round 2 and 15 in round 1; 2 clients."""
    training = {"batch": 3, "epochs": 5, "first_round_factor": 3}
    (run,), _ = read_runs([write_run("a", config={"training": training})])
    assert run.local_update_steps == 2 * (15 + 5) * 2


def test_local_update_steps_leave_newcomers_out(write_run):
    """One client in 2 rounds of 20 epochs with one batch each."""
    (run,), _ = read_runs([write_run("a", config={"clients": 1, "holdout_clients": 1})])
    assert run.local_update_steps == 40


def test_reference_is_that_of_the_first_comparison(write_run, write_points):
    for name, reference in (("first", "local"), ("second", "fedavg")):
        write_run(f"{name}/run")
        write_points(name, {"run": {}}, reference)
    run = write_run("alone")
    assert read_reference([run, run.parent / "first", run.parent / "second"]) == "local"
    assert read_reference([run]) is None


def test_run_stands_for_every_point_that_its_sweep_gives_it(write_run, write_points, compare):
    for name, method in (("a1", "fedspd"), ("a2", "fedspd"), ("b", "local")):
        clusters = int(name[1:] or 1)
        write_run(f"s/{name}", method, scores=(0.5, 0.7), config={"clusters": clusters})
    points = {"a1": {"clusters": 1}, "a2": {"clusters": 2}, "b": {"clusters": 1}}
    folder = write_points("s", points)
    record = RunFolder(folder)
    record.write("compare.json", record.read("compare.json") | {"also": {"b": [{"clusters": 2}]}})
    rows = compare(folder).rows
    assert [(row.method, row.point["clusters"]) for row in rows] == [
        ("fedspd", 1),
        ("local", 1),
        ("fedspd", 2),
        ("local", 2),
    ]
    assert rows[3].difference.mean == pytest.approx(0)


@pytest.mark.parametrize("name", ["run.json", "partition.json", "result.json"])
def test_report_refuses_an_empty_document(write_run, name):
    folder = write_run("a")
    (folder / name).write_text("{}" if name != "run.json" else '{"format": 1}')
    with pytest.raises(StorageError, match=rf"{name}' is damaged: it has no '\w+'. Restore it"):
        read_runs([folder])


def test_report_refuses_an_empty_comparison(write_run, tmp_path):
    write_run("c/a")
    (tmp_path / "c" / "compare.json").write_text("{}")
    with pytest.raises(StorageError, match=r"compare.json' is damaged: it has no 'points'"):
        read_runs([tmp_path / "c"])


@pytest.mark.parametrize(
    ("lines", "left"),
    [(0, "0 of 2 rounds and not the final phase"), (1, "1 of 2 rounds and not"), (2, "2 of 2")],
)
def test_report_refuses_half_of_the_events(write_run, lines, left):
    folder = write_run("a")
    events = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(events[:lines]))
    with pytest.raises(StorageError, match=rf"events.jsonl' is damaged: {left}"):
        read_runs([folder])
