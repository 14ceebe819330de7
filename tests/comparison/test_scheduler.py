"""Many runs side by side: which there are, that they are fair, and that they are continued, not repeated."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from fedspd.comparison import scheduler
from fedspd.comparison.jobs import list_jobs, parse_grid
from fedspd.comparison.scheduler import run_all
from fedspd.config import load
from fedspd.core.errors import ConfigError, FedspdError, StorageError, WorkerError
from fedspd.experiment import runner
from fedspd.storage.run_folder import RunFolder

TINY = [
    "clients=6",
    "rounds=3",
    "data.examples=20",
    "topology.kind=ring",
    "training.epochs=1",
    "training.batch=10",
    "fedspd.final_epochs=1",
]


def base(*overrides):
    return load(overrides=[*TINY, *overrides])


def started(event_log):
    """The runs that were started or continued, without those that were finished before."""
    starts = [event for event in event_log.events if event["event"] == "start"]
    return sorted(event["run"] for event in starts if event["round"] <= event["rounds"])


def finals(event_log):
    return [event["run"] for event in event_log.events if event["event"] == "final"]


def results(folder):
    return {
        path.parent.name: json.loads(path.read_text())["hash"]
        for path in folder.glob("*/result.json")
    }


# ---- which runs


def test_a_comparison_is_every_method_with_every_seed_from_the_configs_on():
    todo = list_jobs(base("seed=5"), ["fedspd", "local"], 2)
    assert [job.name for job in todo] == [
        "fedspd,seed=5",
        "local,seed=5",
        "fedspd,seed=6",
        "local,seed=6",
    ]
    assert [(job.config.method, job.config.seed) for job in todo] == [
        ("fedspd", 5),
        ("local", 5),
        ("fedspd", 6),
        ("local", 6),
    ]


def test_a_sweep_is_a_comparison_at_every_point_of_its_grid():
    todo = list_jobs(base(), ["local"], 1, {"topology.degree": [2, 4], "clusters": [1, 3]})
    assert [job.name for job in todo] == [
        f"topology.degree={d},clusters={s},local,seed=0" for d in (2, 4) for s in (1, 3)
    ]
    assert [(job.config.topology.degree, job.config.clusters) for job in todo] == [
        (2, 1),
        (2, 3),
        (4, 1),
        (4, 3),
    ]
    assert todo[3].point == {"topology.degree": 4, "clusters": 3}


def test_a_swept_option_of_one_method_is_no_reason_to_run_the_others_again():
    todo = list_jobs(base(), ["fedspd", "fedavg"], 1, {"fedavg.finetune": [0, 5]})
    assert [job.name for job in todo] == [
        "fedspd,seed=0",
        "fedavg.finetune=0,fedavg,seed=0",
        "fedavg.finetune=5,fedavg,seed=0",
    ]
    assert [job.point for job in todo] == [{}, {"fedavg.finetune": 0}, {"fedavg.finetune": 5}]


def test_values_with_commas_sweep_unless_they_are_a_list_or_in_quotes():
    single, grid = parse_grid(
        [
            "rounds=3",
            "topology.degree=2,4.5",
            "data.mixture=rotation,parity",
            'data.name="a,b.npz"',
            "x=[1,2]",
        ]
    )
    assert single == ["rounds=3", 'data.name="a,b.npz"', "x=[1,2]"]
    assert grid == {"topology.degree": [2, 4.5], "data.mixture": ["rotation", "parity"]}


@pytest.mark.parametrize(
    ("methods", "seeds", "grid", "sentence"),
    [
        (["fedspd"], 0, {}, "seeds = 0: too few; expected at least 1."),
        ([], 1, {}, "methods = []: too few; expected at least one method."),
        (
            ["local", "local"],
            1,
            {},
            "methods = local, local: a method is repeated; expected each once.",
        ),
        (["fedsdp"], 1, {}, "method = 'fedsdp': unknown method; did you mean 'fedspd'?"),
        (["local"], 1, {"seed": [1, 2]}, "seed = 1, 2: not a key to sweep; expected it as seeds."),
        (
            ["local"],
            1,
            {"method": ["local"]},
            "method = local: not a key to sweep; expected it as methods.",
        ),
        (
            ["local"],
            1,
            {"clusters": [2, 2]},
            "clusters = 2, 2: a value is repeated; expected each once.",
        ),
        (
            ["local"],
            1,
            {"fedavg.finetune": [0, 5]},
            "fedavg.finetune = 0, 5: no method has this option; expected fedavg among the methods.",
        ),
        (
            ["local"],
            1,
            {"data.name": ["a/b", "a_b"]},
            "'data.name=a_b,local,seed=0': the folder of two runs; expected one run each. Rename a value.",
        ),
        (["local"], 1, {"clusters": [2, "x"]}, 'clusters = "x": expected an integer.'),
    ],
)
def test_what_is_no_comparison(methods, seeds, grid, sentence):
    with pytest.raises(ConfigError) as caught:
        list_jobs(base(), methods, seeds, grid)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("key", ["fedavg.lambda", "fedspd.lambda"])
def test_an_option_of_other_methods_says_whose_it_is(key):
    with pytest.raises(ConfigError) as caught:
        base(f"{key}=3")
    assert str(caught.value) == f"{key}: unknown key; 'lambda' is an option of fedsoft, pfedme."


# ---- running them


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A comparison that was never interrupted, its runs one after the other."""
    folder = tmp_path_factory.mktemp("whole") / "c"
    run_all(list_jobs(base(), ["fedspd", "fedavg", "local"], 2), folder, 1)
    return folder


def test_one_seed_gives_one_split_and_one_graph_to_all_methods(whole):
    for seed in (0, 1):
        records = [
            RunFolder.open(whole / f"{method},seed={seed}")
            for method in ("fedspd", "fedavg", "local")
        ]
        assert len({record.read("partition.json")["hash"] for record in records}) == 1
        assert len({str(record.read("topology.json")["list"]) for record in records}) == 1
    hashes = {
        RunFolder.open(whole / f"local,seed={seed}").read("partition.json")["hash"]
        for seed in (0, 1)
    }
    assert len(hashes) == 2


def test_the_runs_are_those_that_fedspd_run_makes(whole):
    alone = runner.run(base("method=fedavg", "seed=1"))
    assert results(whole)["fedavg,seed=1"] == alone.summary["hash"]


def test_workers_do_not_matter(whole, tmp_path, event_log):
    run_all(list_jobs(base(), ["fedspd", "fedavg", "local"], 2), tmp_path / "c", 3, [event_log])
    assert results(tmp_path / "c") == results(whole)
    assert len(results(whole)) == 6
    assert sorted(finals(event_log)) == sorted(results(whole))


def test_finished_runs_are_not_repeated_and_missing_ones_are_made(whole, tmp_path, event_log):
    todo = list_jobs(base(), ["fedspd", "local"], 2)
    run_all(todo[:2], tmp_path / "part", 2)
    (tmp_path / "part" / "compare.json").unlink()
    before = (tmp_path / "part" / "local,seed=0" / "result.json").stat().st_mtime_ns
    with pytest.raises(StorageError, match="not a comparison, and not empty"):
        run_all(todo, tmp_path / "part", 1)
    _note(tmp_path / "part", todo)
    run_all(todo, tmp_path / "part", 2, [event_log])
    assert started(event_log) == ["fedspd,seed=1", "local,seed=1"]
    assert results(tmp_path / "part").items() <= results(whole).items()
    assert (tmp_path / "part" / "local,seed=0" / "result.json").stat().st_mtime_ns == before


def _note(folder, todo):
    """As if the comparison had been killed after its first runs."""
    runs = {job.name: scheduler.config_hash(job.config) for job in todo}
    points = {job.name: job.point for job in todo}
    content = {"runs": runs, "points": points, "reference": todo[0].config.method}
    RunFolder(folder).write("compare.json", content)


def test_a_folder_of_another_comparison_is_refused_and_left_alone(tmp_path):
    run_all(list_jobs(base(), ["local"], 1), tmp_path / "c", 1)
    with pytest.raises(StorageError, match="the folder holds another comparison"):
        run_all(list_jobs(base("rounds=4"), ["local"], 1), tmp_path / "c", 1)
    assert list(results(tmp_path / "c")) == ["local,seed=0"]


def test_what_cannot_be_is_refused_before_there_is_a_folder(tmp_path):
    todo = list_jobs(base("topology.kind=er"), ["local"], 1, {"topology.degree": [2, 25]})
    with pytest.raises(FedspdError, match=r"topology\.degree = 25"):
        run_all(todo, tmp_path / "c", 2)
    assert not (tmp_path / "c").exists()


def test_every_seed_is_tried_before_there_is_a_folder(tmp_path):
    """Seed 2 deals more even digits than there are; seeds 0, 1 and 3 do not."""
    todo = list_jobs(base("clients=5", "data.examples=230", "data.mixture=parity"), ["local"], 4)
    with pytest.raises(FedspdError, match=r"In the run 'local,seed=2': data\.examples = 230"):
        run_all(todo, tmp_path / "c", 2)
    assert not (tmp_path / "c").exists()


def test_a_run_that_fails_says_which(tmp_path, monkeypatch):
    (tmp_path / "falls.py").write_text(
        "from torch import nn\nclass Net(nn.Linear):\n"
        "    def __init__(self, shape, classes):\n        super().__init__(64, classes)\n"
        "    def forward(self, x):\n        assert not self.training, 'not today'\n        return super().forward(x.flatten(1))\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerError, match=r"The run 'local,seed=\d' failed:(?s:.*)not today"):
        run_all(list_jobs(base("model.name=falls:Net"), ["local"], 2), tmp_path / "c", 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_comparison_that_was_ended_is_continued_to_the_same_results(number, tmp_path, event_log):
    todo, folder = list_jobs(base("rounds=12"), ["fedspd", "local"], 2), tmp_path / "c"
    process = multiprocessing.get_context("fork").Process(target=_start, args=(todo, folder))
    process.start()
    _until(lambda: any(path.stat().st_size for path in folder.glob("fedspd,*/events.jsonl")))
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode not in (0, None)
    done = set(results(folder))
    run_all(todo, folder, 2, [event_log])
    run_all(todo, tmp_path / "whole", 1)
    assert results(folder) == results(tmp_path / "whole")
    assert done.isdisjoint(started(event_log))


def _start(todo, folder):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    run_all(todo, folder, 2)


def _until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def test_the_run_folders_come_back_in_order(whole):
    todo = list_jobs(base(), ["fedspd", "fedavg", "local"], 2)
    assert run_all(todo, whole, 4) == [Path(whole) / job.name for job in todo]


def test_runs_on_a_gpu_take_turns_in_this_process(tmp_path, monkeypatch):
    """There is none here: what is tested is that nothing forks."""
    monkeypatch.setattr(scheduler, "device_of", lambda config: torch.device("cuda"))
    monkeypatch.setattr(scheduler, "_start", lambda *_: pytest.fail("a fork"))
    run_all(list_jobs(base(), ["local", "fedavg"], 1), tmp_path / "c", 2)
    assert sorted(results(tmp_path / "c")) == ["fedavg,seed=0", "local,seed=0"]
