"""Runs in turn and in parallel: they are fair, and they are continued, not repeated."""

import json
import multiprocessing
import os
import signal

import pytest
import torch

from fedspd.comparison import scheduler
from fedspd.comparison.jobs import list_jobs
from fedspd.comparison.scheduler import run_all
from fedspd.config import load
from fedspd.core.errors import FedspdError, StorageError, WorkerError
from fedspd.experiment import runner
from fedspd.experiment.sharing import rounds_key
from fedspd.storage.run_folder import RunFolder

METHODS = ("fedspd", "fedavg", "local")
TINY = [
    "clients=6",
    "rounds=3",
    "data.examples=20",
    "topology.kind=ring",
    "training.epochs=1",
    "training.batch=10",
    "method=fedspd",
    "fedspd.final_epochs=1",
]


def tiny(*overrides):
    return load(overrides=[*TINY, *overrides])


def started(event_log):
    """Return the runs that were started or continued, without those that were finished before."""
    starts = [event for event in event_log.events if event["event"] == "start"]
    return sorted(event["run"] for event in starts if event["round"] <= event["rounds"])


def hashes(folder):
    paths = folder.glob("*/result.json")
    return {path.parent.name: json.loads(path.read_text())["hash"] for path in paths}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Run three methods with two seeds, one after the other."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "c"
    run_all(list_jobs(tiny(), METHODS, 2), folder, 1)
    return folder


def test_methods_share_partition_and_graph_of_a_seed(uninterrupted):
    partitions = set()
    for seed in (0, 1):
        records = [RunFolder.open(uninterrupted / f"{method},seed={seed}") for method in METHODS]
        (partition,) = {record.read("partition.json")["hash"] for record in records}
        assert len({str(record.read("topology.json")["list"]) for record in records}) == 1
        partitions.add(partition)
    assert len(partitions) == 2


def test_runs_equal_single_runs(uninterrupted):
    single = runner.run(tiny("method=fedavg", "seed=1", "fedspd.final_epochs=default"))
    assert hashes(uninterrupted)["fedavg,seed=1"] == single.summary["hash"]


def test_workers_do_not_change_the_results(uninterrupted, tmp_path, event_log):
    run_all(list_jobs(tiny(), METHODS, 2), tmp_path / "c", 3, [event_log])
    assert hashes(tmp_path / "c") == hashes(uninterrupted)
    finals = [event["run"] for event in event_log.events if event["event"] == "final"]
    assert len(finals) == 6
    assert sorted(finals) == sorted(hashes(uninterrupted))


def test_run_folders_are_returned_in_the_order_of_the_jobs(uninterrupted):
    jobs = list_jobs(tiny(), METHODS, 2)
    assert run_all(jobs, uninterrupted, 4) == [uninterrupted / job.name for job in jobs]


def test_comparison_records_its_runs_points_and_reference(tmp_path):
    (job,) = list_jobs(tiny(), ["local"], 1, {"clusters": [3]})
    for reference, recorded in ((None, "local"), ("fedspd", "fedspd")):
        run_all([job], tmp_path / recorded, 1, reference=reference)
        assert RunFolder(tmp_path / recorded).read("compare.json") == {
            "points": {"clusters=3,local,seed=0": {"clusters": 3}},
            "reference": recorded,
        }


def test_finished_runs_are_not_repeated(uninterrupted, tmp_path, event_log):
    jobs, folder = list_jobs(tiny(), ["fedspd", "local"], 2), tmp_path / "c"
    run_all(jobs[:2], folder, 2)
    pretend_interrupted(folder, jobs)
    before = (folder / "local,seed=0" / "result.json").stat().st_mtime_ns
    run_all(jobs, folder, 2, [event_log])
    assert started(event_log) == ["fedspd,seed=1", "local,seed=1"]
    assert hashes(folder).items() <= hashes(uninterrupted).items()
    assert (folder / "local,seed=0" / "result.json").stat().st_mtime_ns == before


def pretend_interrupted(folder, jobs):
    """Make the folder that of all jobs, of which some have finished."""
    (folder / "compare.json").unlink()
    with pytest.raises(StorageError, match="not a comparison, and not empty"):
        run_all(jobs, folder, 1)
    content = {
        "points": {job.name: job.point for job in jobs},
        "reference": jobs[0].config.method,
    }
    RunFolder(folder).write("compare.json", content)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_comparison_continues_to_the_same_results(number, gate, tmp_path, event_log):
    jobs, folder = list_jobs(tiny(), ["gated:Gated", "local"], 2), tmp_path / "c"
    process = multiprocessing.get_context("fork").Process(target=run_quietly, args=(jobs, folder))
    process.start()
    gate.wait()
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode not in (0, None)
    finished = set(hashes(folder))
    gate.open()
    run_all(jobs, folder, 2, [event_log])
    run_all(jobs, tmp_path / "uninterrupted", 1)
    assert hashes(folder) == hashes(tmp_path / "uninterrupted")
    assert finished.isdisjoint(started(event_log))


def run_quietly(jobs, folder):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    run_all(jobs, folder, 2)


def test_ctrl_c_that_python_loses_ends_parallel_runs(tmp_path, loses_ctrl_c):
    with pytest.raises(KeyboardInterrupt):
        run_all(list_jobs(tiny(), METHODS, 1), tmp_path / "c", 2, [loses_ctrl_c("start")])
    assert multiprocessing.active_children() == []


def test_comparison_that_older_code_began_gets_another_method(tmp_path, event_log):
    """Older code knew fewer keys, so that its configs and their hashes were others."""
    folder = tmp_path / "c"
    run_all(list_jobs(tiny(), ["local"], 1), folder, 1)
    forget_a_key(folder / "local,seed=0")
    content = RunFolder(folder).read("compare.json")
    RunFolder(folder).write("compare.json", content | {"runs": {"local,seed=0": "another"}})
    run_all(list_jobs(tiny(), ["local", "fedavg"], 1), folder, 1, [event_log], "local")
    assert started(event_log) == ["fedavg,seed=0"]


def forget_a_key(folder):
    """Let a run folder be one that was written before there was `exchange`."""
    path = folder / "config.toml"
    path.write_text(path.read_text().replace('[exchange]\ndtype = "float32"\n', ""))
    metadata = RunFolder(folder).read("run.json")
    assert metadata["config"].pop("exchange") == {"dtype": "float32"}
    metadata["hashes"]["config"] = "another"
    RunFolder(folder).write("run.json", metadata)


def test_run_that_older_code_began_is_resumed(tmp_path):
    config = tiny("method=local", "fedspd.final_epochs=default")
    result = runner.run(config, out=tmp_path / "a")
    forget_a_key(tmp_path / "a")
    (tmp_path / "a" / "result.json").unlink()
    again = runner.run(config, out=tmp_path / "a", resume=True)
    assert again.summary == result.summary
    assert runner.run(out=tmp_path / "a", resume=True).summary == result.summary


# ---- refusals and failures


def test_folder_of_another_comparison_is_rejected_and_left_alone(tmp_path):
    run_all(list_jobs(tiny(), ["local"], 1), tmp_path / "c", 1)
    sentence = "the folder holds another comparison: rounds = 3 in 'local,seed=0', now 4."
    with pytest.raises(StorageError, match=sentence):
        run_all(list_jobs(tiny("rounds=4"), ["local"], 1), tmp_path / "c", 1)
    assert list(hashes(tmp_path / "c")) == ["local,seed=0"]


def test_impossible_point_is_rejected_before_there_is_a_folder(tmp_path):
    jobs = list_jobs(tiny("topology.kind=er"), ["fedavg"], 1, {"topology.degree": [2, 25]})
    with pytest.raises(FedspdError, match=r"topology\.degree = 25"):
        run_all(jobs, tmp_path / "c", 2)
    assert not (tmp_path / "c").exists()


def test_every_seed_is_built_before_there_is_a_folder(tmp_path):
    """Seed 2 assigns more even digits than there are; seeds 0, 1 and 3 do not."""
    base = tiny("clients=5", "data.examples=230", "data.mixture=parity")
    with pytest.raises(FedspdError, match=r"In the run 'local,seed=2': data\.examples = 230"):
        run_all(list_jobs(base, ["local"], 4), tmp_path / "c", 2)
    assert not (tmp_path / "c").exists()


def test_run_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__(64, classes)\n"
        "    def forward(self, x):\n"
        "        assert not self.training, 'not today'\n"
        "        return super().forward(x.flatten(1))\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerError, match=r"The run 'local,seed=\d' failed:(?s:.*)not today"):
        run_all(list_jobs(tiny("model.name=failing:Net"), ["local"], 2), tmp_path / "c", 2)


def test_runs_on_a_gpu_take_turns_without_a_fork(tmp_path, monkeypatch):
    """There is no GPU here: the test is that nothing forks."""
    monkeypatch.setattr(scheduler, "device_of", lambda config: torch.device("cuda"))
    monkeypatch.setattr(scheduler, "_start", lambda *_: pytest.fail("a fork"))
    run_all(list_jobs(tiny(), ["local", "fedavg"], 1), tmp_path / "c", 2)
    assert sorted(hashes(tmp_path / "c")) == ["fedavg,seed=0", "local,seed=0"]


FINAL_EPOCHS = "fedspd.final_epochs"


def test_runs_that_differ_in_the_final_phase_share_their_rounds(tmp_path, event_log):
    grid = {FINAL_EPOCHS: [0, 2], "fedavg.finetune": [1, 0]}
    jobs, folder = list_jobs(tiny(), METHODS, 1, grid), tmp_path / "c"
    run_all(jobs, folder, 2, [event_log])
    found = hashes(folder)
    assert len(found) == 5
    for job in jobs:
        assert found[job.name] == runner.run(job.config).summary["hash"]
        assert load(folder / job.name / "config.toml") == job.config
    starts = [event["round"] for event in event_log.events if event["event"] == "start"]
    assert sorted(starts) == [0, 0, 0, 3, 3]
    (short, long) = [job.name for job in jobs if job.config.method == "fedspd"]
    assert RunFolder(folder / long).read("run.json")["rounds_from"] == short


def test_finished_run_lends_its_rounds_to_a_later_comparison(tmp_path, event_log):
    jobs, folder = list_jobs(tiny(), ["fedspd"], 1, {FINAL_EPOCHS: [0, 2]}), tmp_path / "c"
    run_all(jobs[:1], folder, 1)
    pretend_interrupted(folder, jobs)
    stale = folder / jobs[1].name / "checkpoints/round-000003"
    stale.mkdir(parents=True)  # of a start that ended before run.json
    (folder / jobs[1].name / ".lock").touch()
    run_all(jobs, folder, 1, [event_log])
    assert [e["round"] for e in event_log.events if e["event"] == "round"] == []
    assert hashes(folder)[jobs[1].name] == runner.run(jobs[1].config).summary["hash"]


def test_only_runs_without_privacy_have_rounds_to_share():
    one, other = (tiny("method=fedavg", f"fedavg.finetune={n}") for n in (1, 0))
    assert rounds_key(one) == rounds_key(other) is not None
    assert rounds_key(tiny("method=fedavg", "rounds=7")) != rounds_key(other)
    assert rounds_key(tiny("method=fedavg", "privacy.epsilon=8")) is None


@pytest.mark.long
def test_private_runs_share_no_rounds(tmp_path, event_log):
    jobs = list_jobs(tiny("privacy.epsilon=8"), ["fedavg"], 1, {"fedavg.finetune": [0, 1]})
    run_all(jobs, tmp_path / "c", 1, [event_log])
    assert [e["round"] for e in event_log.events if e["event"] == "start"] == [0, 0]
