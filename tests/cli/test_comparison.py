"""fedspd compare, sweep and report: what they make of good input and of bad."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedspd.cli.main import guarded
from fedspd.storage.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("here")
PROGRAM = str(Path(sys.executable).with_name("fedspd"))
TINY = [
    "clients=6",
    "rounds=3",
    "data.examples=20",
    "topology.kind=ring",
    "training.epochs=1",
    "training.batch=10",
    "fedspd.final_epochs=1",
]
TWO = ["--methods", "fedspd,local", "--seeds", "2", "--workers", "2"]


# ---- good input


def test_a_comparison_ends_with_a_table_and_a_report_and_repeating_it_runs_nothing_again(capsys):
    assert guarded(["compare", *TINY, *TWO, "--out", "c"]) == 0
    printed = capsys.readouterr()
    assert "vs fedspd (pp)" in printed.out
    assert "Report: c/report.html" in printed.out
    assert "local,seed=1: accuracy " in printed.err
    assert {
        "compare.json",
        "report.html",
        "report.md",
        "report.csv",
        "report.json",
        "figures",
    } <= set(os.listdir("c"))
    before = {path: path.stat().st_mtime_ns for path in Path("c").glob("*/*.json*")}
    assert guarded(["compare", *TINY, *TWO, "--out", "c", "--json"]) == 0
    printed = capsys.readouterr()
    assert "accuracy" not in printed.err.split("Test accuracy")[0]
    assert {path: path.stat().st_mtime_ns for path in Path("c").glob("*/*.json*")} == before
    last = json.loads(printed.out)
    assert (last["folder"], last["report"], last["notes"]) == ("c", "c/report.html", [])
    means = [
        RunFolder(Path("c") / f"local,seed={seed}").read("result.json")["accuracy"]["mean"]
        for seed in (0, 1)
    ]
    assert last["rows"][1]["accuracy"]["mean"] == pytest.approx(sum(means) / 2)


def test_a_regression_is_compared_by_its_loss(here, capsys):
    x = np.random.default_rng(0).normal(size=(300, 3))
    np.savez("own.npz", x=x, y=x @ [1.0, -2.0, 0.5])
    own = [*TINY, "data.name=own.npz", "data.mixture=iid", "model.name=linear"]
    assert guarded(["compare", *own, *TWO, "--out", "c"]) == 0
    shown = capsys.readouterr().out
    assert "Test loss and cost" in shown
    losses = [
        np.mean(
            RunFolder(Path("c") / f"local,seed={seed}").read("result.json")["clients"]["test_loss"]
        )
        for seed in (0, 1)
    ]
    assert f" {np.mean(losses):.3g} " in next(
        line for line in shown.splitlines() if "local" in line
    )
    assert guarded(["run", *own, "method=local", "--out", "r", "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Test loss across clients and communication cost" in shown
    assert f" {losses[0]:.3g} " in next(line for line in shown.splitlines() if "local" in line)


def test_newcomers_of_a_regression_are_scored_by_their_loss(here, capsys):
    x = np.random.default_rng(0).normal(size=(300, 3))
    np.savez("own.npz", x=x, y=x @ [1.0, -2.0, 0.5])
    own = [
        *TINY,
        "data.name=own.npz",
        "data.mixture=iid",
        "model.name=linear",
        "method=local",
        "holdout_clients=2",
    ]
    assert guarded(["run", *own, "--out", "r", "--workers", "1"]) == 0
    found = np.mean(RunFolder(Path("r")).read("result.json")["newcomers"]["test_loss"])
    assert f"local: newcomers have a test loss of {found:.3g} on average" in capsys.readouterr().out
    assert guarded(["report", "r", "--out", "rep"]) == 0
    assert "newcomers' loss" in capsys.readouterr().out
    (row,) = csv.DictReader(Path("rep/report.csv").read_text().splitlines())
    assert float(row["newcomers_test_loss"]) == pytest.approx(found)


def test_an_option_that_is_a_list_can_be_swept(here, capsys):
    (here / "layers.py").write_text(
        "from dataclasses import dataclass, field\nfrom fedspd.algorithms.local import Local\n\n\n"
        "@dataclass(frozen=True)\nclass Layers(Local):\n    widths: list[int] = field(default_factory=list)\n"
    )
    words = [
        "sweep",
        *TINY,
        "options.widths=[1],[1,2]",
        "--methods",
        "layers:Layers",
        "--seeds",
        "1",
        "--workers",
        "1",
        "--out",
        "s",
    ]
    assert guarded(words) == 0
    assert Path("s/figures/accuracy-by-options.widths.png").exists()
    assert (
        guarded(["run", *TINY, "method=layers:Layers", "--workers", "1", "--out", "r"]) == 0
    )  # its default is made anew for each
    assert RunFolder(Path("r")).read("run.json")["config"]["options"] == {"widths": []}


def test_options_of_ones_own_method_are_swept_for_it_alone(here, capsys):
    (here / "pulled.py").write_text(
        "from dataclasses import dataclass\nfrom fedspd.algorithms.local import Local\n\n\n"
        "@dataclass(frozen=True)\nclass Pulled(Local):\n    pull: float = 0.0\n"
    )
    words = [
        "sweep",
        *TINY,
        "options.pull=1.0,2.0",
        "--seeds",
        "1",
        "--workers",
        "1",
        "--out",
        "s",
        "--methods",
    ]
    assert guarded([*words, "local,fedavg"]) == 2
    assert capsys.readouterr().err == (
        "fedspd: options.pull = 1.0, 2.0: no method has this option; "
        "expected a method given as module:Class among the methods.\n"
    )
    assert guarded([*words, "local,pulled:Pulled"]) == 0
    assert sorted(RunFolder(Path("s")).read("compare.json")["points"].values(), key=str) == [
        {"options.pull": 1.0},
        {"options.pull": 2.0},
        {},
    ]


def test_a_config_file_and_a_folder_of_its_own(here, capsys):
    (here / "tiny.toml").write_text(
        'clients = 4\nrounds = 1\n[data]\nexamples = 20\n[topology]\nkind = "ring"\n'
    )
    for number in (1, 2):
        assert (
            guarded(
                ["compare", "tiny.toml", "--methods", "local", "--seeds", "1", "--workers", "1"]
            )
            == 0
        )
        assert f"runs/compare-digits-{number}/report.html" in capsys.readouterr().out


def test_a_sweep_and_a_report_of_a_part_of_it(capsys):
    words = [
        "sweep",
        *TINY,
        "topology.kind=er",
        "topology.degree=2,4",
        "--methods",
        "fedspd,local",
        "--seeds",
        "1",
        "--workers",
        "2",
    ]
    assert guarded([*words, "--out", "s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["point"]) for row in found["rows"]] == [
        (method, {"topology.degree": degree}) for degree in (2, 4) for method in ("fedspd", "local")
    ]
    assert Path("s/figures/accuracy-by-topology.degree.png").exists()
    assert guarded(["report", *map(str, Path("s").glob("topology.degree=2,*")), "--json"]) == 0
    part = json.loads(capsys.readouterr().out)
    assert (part["folder"], part["axes"], len(part["rows"])) == ("report", [], 2)


def test_a_report_says_what_it_leaves_out_and_ends_well(capsys):
    assert guarded(["compare", *TINY, *TWO, "--out", "c"]) == 0
    assert (
        guarded(
            [
                "run",
                *TINY,
                "data.mixture=parity",
                "method=local",
                "--out",
                "other",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    (Path("c") / "local,seed=1" / "result.json").unlink()
    page = Path("c/report.html").read_text()
    capsys.readouterr()
    assert guarded(["report", "c", "other", "--out", "both"]) == 0
    error = capsys.readouterr().err.splitlines()
    assert error[0] == "fedspd: 'c/local,seed=1' is left out: the run is not finished."
    assert error[1].startswith(
        "fedspd: 'other' is left out: its data differ from those of 'c/fedspd,seed=0' (mixture: parity instead of rotation"
    )
    assert len(error) == 2
    assert Path("c/report.html").read_text() == page
    assert guarded(["report", "c"]) == 0
    assert Path("c/report.html").read_text() != page


def test_a_report_of_runs_with_newcomers(capsys):
    assert guarded(["run", *TINY, "holdout_clients=2", "--out", "a", "--workers", "1"]) == 0
    assert guarded(["report", "a"]) == 0
    assert "newcomers" in capsys.readouterr().out


# ---- bad input

BAD = {
    "no seed": (["compare", "--seeds", "0"], "seeds = 0: too few; expected at least 1."),
    "unknown method": (
        ["compare", "--methods", "fedspd,fedagv"],
        "method = 'fedagv': unknown method; did you mean 'fedavg'?",
    ),
    "another method's option": (
        ["compare", "fedavg.lambda=3"],
        "fedavg.lambda: unknown key; 'lambda' is an option of fedsoft, pfedme.",
    ),
    "no method": (
        ["compare", "--methods", ","],
        "methods = []: too few; expected at least one method.",
    ),
    "no config": (
        ["compare", "none.toml"],
        "config = 'none.toml': no such file; expected a TOML file.",
    ),
    "missing data": (["compare", "data.name=mnist"], "fedspd data get mnist"),
    "nothing to sweep": (
        ["sweep", "clients=6"],
        "No key has several values; expected at least one",
    ),
    "an impossible point": (
        ["sweep", "clients=6", "topology.degree=2,25", "--out", "c"],
        "topology.degree = 25",
    ),
    "no run": (["report", "."], "'.': not a run folder; expected a folder with run.json."),
    "not even a folder": (["report", "nowhere"], "'nowhere': not a run folder"),
    "nothing to report": (["report"], "Missing argument 'RUN...'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_exit_code_2_and_nothing_written(name, capsys, here):
    words, sentence = BAD[name]
    assert guarded(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("fedspd: ")
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert list(here.iterdir()) == []


def test_a_folder_of_another_comparison(capsys):
    words = ["compare", *TINY, "--methods", "local", "--out", "c", "--workers", "1"]
    assert guarded([*words, "--seeds", "1"]) == 0
    capsys.readouterr()
    assert guarded([*words, "--seeds", "2"]) == 2
    assert "'c': the folder holds another comparison." in capsys.readouterr().err


# ---- interruption


SLOW = [
    "compare",
    *TINY,
    "rounds=20",
    "--methods",
    "fedspd,local",
    "--seeds",
    "1",
    "--workers",
    "2",
]


def _started(words):
    return subprocess.Popen(
        [PROGRAM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _until(happened):
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the runs in /proc")
def test_a_comparison_without_out_whose_run_was_killed_says_how_to_continue(here):
    started = _started(SLOW)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    _until(
        lambda: (
            any(path.stat().st_size for path in here.glob("runs/*/fedspd,*/events.jsonl"))
            and children.read_text()
        )
    )
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    _, error = started.communicate(timeout=30)
    assert started.returncode == 1
    assert (
        f"Continue with: fedspd {' '.join(SLOW)} --out {next(here.glob('runs/*')).relative_to(here)}\n"
        in error
    )
    assert "' ended with exit code -9" in error


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_stopped_comparison_says_how_to_continue_and_does(number, here):
    words = [*SLOW, "--out", "c"]
    started = _started(words)
    _until(lambda: any(path.stat().st_size for path in here.glob("c/fedspd,*/events.jsonl")))
    os.killpg(started.pid, number) if number == signal.SIGINT else started.send_signal(number)
    _, error = started.communicate(timeout=30)
    assert started.returncode == 130
    assert "Traceback" not in error
    assert f"Continue with: fedspd {' '.join(words)}\n" in error
    assert not (here / "c" / "report.html").exists()
    assert guarded(words) == 0
    assert len(list(here.glob("c/*/result.json"))) == 2
    assert (here / "c" / "report.html").exists()
