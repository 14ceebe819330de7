"""fedspd compare, sweep and report."""

import csv
import html
import io
import json
import os
import re
import shutil
import signal
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fedspd
from chaos.commands import Command
from fedspd.cli.main import execute
from fedspd.storage.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("here", "blank_figures")
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
PLAIN = [word for word in TINY if not word.startswith("fedspd")]
BOTH = ["--methods", "fedspd,local", "--workers", "2"]
ONE_SEED = ["--seeds", "1", "--workers", "1"]
COMPARE = ["compare", *TINY, *BOTH, "--seeds", "2", "--out", "c"]
REPORT = {f"report.{kind}" for kind in ("html", "md", "tex", "csv", "json")}
DOCUMENTS = {"compare.json", "figures", *REPORT}


@pytest.fixture(scope="module")
def first_comparison(tmp_path_factory):
    """Run COMPARE once for all tests."""
    folder, out, err = tmp_path_factory.mktemp("compared"), io.StringIO(), io.StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        assert execute(COMPARE) == 0
    return folder / "c", SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())


@pytest.fixture
def compared(first_comparison, here):
    """Copy the folder of COMPARE into the current folder, and return what the command printed."""
    folder, done = first_comparison
    shutil.copytree(folder, here / "c")
    return done


@pytest.fixture
def regression():
    """Return settings with data whose labels are numbers."""
    x = np.random.default_rng(0).normal(size=(300, 3))
    np.savez("own.npz", x=x, y=x @ [1.0, -2.0, 0.5])
    return [*PLAIN, "data.name=own.npz", "data.mixture=iid", "model.name=linear"]


def read_result(folder):
    return RunFolder(Path(folder)).read("result.json")


def run_quickly(*settings, out):
    """Run without the figures of the command."""
    fedspd.run(fedspd.load(overrides=settings), out=out)


def modification_times(folder):
    return {path: path.stat().st_mtime_ns for path in Path(folder).glob("*/*.json*")}


# ---- compare


def test_compare_ends_with_a_table_and_a_report(compared):
    assert "vs fedspd (pp)" in compared.stdout
    assert "Report: c/report.html" in compared.stdout
    assert "local,seed=1: accuracy " in compared.stderr
    assert set(os.listdir("c")) >= DOCUMENTS


def test_compare_again_runs_nothing_again(compared, capsys):
    before = modification_times("c")
    assert execute([*COMPARE, "--json"]) == 0
    assert modification_times("c") == before
    printed = capsys.readouterr()
    assert "accuracy" not in printed.err.split("Test accuracy")[0]
    last = json.loads(printed.out)
    assert (last["folder"], last["report"], last["notes"]) == ("c", "c/report.html", [])
    means = [read_result(f"c/local,seed={seed}")["accuracy"]["mean"] for seed in (0, 1)]
    local = last["rows"][1]
    assert local["accuracy"]["mean"] == pytest.approx(sum(means) / 2)
    assert local["steps_ratio"] == 1  # one local update by every client in every round


def test_compare_without_methods_takes_its_own_as_reference_and_ends_with_advice(capsys):
    words = ["compare", *TINY, "method=fedspd-split", "rounds=5", *ONE_SEED, "--out", "c"]
    assert execute([*words, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    names = ["fedspd-split", "fedspd", "fedavg, finetune=0", "fedavg, finetune=10", "local"]
    assert [row["name"] for row in found["rows"]] == names
    assert "vs fedspd-split (pp)" in printed.err
    advice = f"Advice: {found['advice']['sentence']}"
    assert advice in printed.err
    assert advice in Path("c/report.md").read_text()
    page = Path("c/report.html").read_text()
    assert advice in html.unescape(re.sub("<[^>]*>", "", page))
    split, fedspd = found["rows"][:2]
    assert found["reference"] == "fedspd-split"
    assert (split["seeds"], split["difference"]) == ([0], None)
    assert fedspd["difference"]["mean"] == pytest.approx(
        fedspd["accuracy"]["mean"] - split["accuracy"]["mean"]
    )
    page, table = Path("c/report.html").read_text(), Path("c/report.md").read_text()
    for text in (page, table):
        assert all(name in text for name in names)
        assert "vs fedspd-split (pp)" in text
    assert "<title>4 methods compared</title>" in page
    assert execute(["report", "c", "--out", "again", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reference"] == "fedspd-split"


def test_compare_with_few_rounds_says_that_no_populations_were_looked_for(capsys):
    words = ["compare", *PLAIN, "rounds=1", "--methods", "fedspd-split,local", *ONE_SEED]
    assert execute([*words, "--out", "c"]) == 0
    shown = capsys.readouterr().out
    assert "The run is not split: rounds = 1 is not above fedspd-split.warmup = 3" in shown
    assert "fits these data: no populations were looked for" in shown


def test_advise_prints_one_line_and_leaves_nothing_behind(here, capsys):
    assert execute(["advise", *PLAIN, "rounds=1", "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    assert " fits these data" in shown
    assert list(here.iterdir()) == []


def test_advise_has_an_answer_for_one_client(capsys):
    assert execute(["advise", *PLAIN, "clients=1", "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown == "local fits these data: there is one client, and nobody to share with.\n"


def test_compare_shows_the_rmse_of_a_regression(regression, capsys):
    assert execute(["compare", *regression, *BOTH, "--seeds", "2", "--out", "c"]) == 0
    shown = capsys.readouterr().out
    assert "Test RMSE and cost" in shown
    clients = [read_result(f"c/local,seed={seed}")["clients"] for seed in (0, 1)]
    rmse = np.mean([client["rmse"] for client in clients])
    (row,) = [line for line in shown.splitlines() if line.startswith(" local ")]
    assert f" {rmse:.3g} " in row


def test_compare_reads_a_config_file_and_numbers_its_folders(here, capsys):
    (here / "tiny.toml").write_text(
        'clients = 4\nrounds = 1\n[data]\nexamples = 20\n[topology]\nkind = "ring"\n'
    )
    (here / "runs/compare-digits-1").mkdir(parents=True)
    assert execute(["compare", "tiny.toml", "--methods", "local", *ONE_SEED]) == 0
    assert "runs/compare-digits-2/report.html" in capsys.readouterr().out


def test_compare_rejects_the_folder_of_another_comparison(compared, capsys):
    words = ["compare", *TINY, *BOTH, "--seeds", "1", "--out", "c"]
    assert execute(words) == 2
    assert "'c': the folder holds another comparison." in capsys.readouterr().err


# ---- sweep


def test_sweep_has_a_row_for_each_method_and_point(capsys):
    words = ["sweep", *TINY, "topology.kind=er", "topology.degree=2,4", "--out", "s", "--json"]
    assert execute([*words, *BOTH, "--seeds", "1"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["method"], row["point"]) for row in rows] == [
        (method, {"topology.degree": degree}) for degree in (2, 4) for method in ("fedspd", "local")
    ]
    assert Path("s/figures/accuracy-by-topology.degree.png").exists()
    assert execute(["report", *map(str, Path("s").glob("topology.degree=2,*")), "--json"]) == 0
    part = json.loads(capsys.readouterr().out)
    assert (part["folder"], part["axes"], len(part["rows"])) == ("report", [], 2)


@pytest.mark.usefixtures("real_figures")
def test_sweep_takes_lists_as_values(here, capsys):
    (here / "layers.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from fedspd.algorithms.local import Local\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Layers(Local):\n"
        "    widths: list[int] = field(default_factory=list)\n"
    )
    words = ["sweep", *PLAIN, "options.widths=[1],[1,2]", "--methods", "layers:Layers"]
    assert execute([*words, *ONE_SEED, "--out", "s"]) == 0
    assert Path("s/figures/accuracy-by-options.widths.png").exists()
    run_quickly(*PLAIN, "method=layers:Layers", out="r")  # the default is a new list each time
    assert RunFolder(Path("r")).read("run.json")["config"]["options"] == {"widths": []}


def test_sweep_varies_options_of_a_users_own_method_for_it_alone(here, capsys):
    (here / "pulled.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedspd.algorithms.local import Local\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Pulled(Local):\n"
        "    pull: float = 0.0\n"
    )
    words = ["sweep", *PLAIN, "options.pull=1.0,2.0", *ONE_SEED, "--out", "s", "--methods"]
    assert execute([*words, "local,fedavg"]) == 2
    assert capsys.readouterr().err == (
        "fedspd: options.pull = 1.0, 2.0: no method has this option; "
        "expected a method given as module:Class among the methods.\n"
    )
    assert execute([*words, "local,pulled:Pulled"]) == 0
    points = RunFolder(Path("s")).read("compare.json")["points"].values()
    assert sorted(points, key=str) == [{"options.pull": 1.0}, {"options.pull": 2.0}, {}]


# ---- report


def test_report_names_the_runs_that_it_leaves_out(compared, capsys):
    run_quickly(*PLAIN, "data.mixture=parity", "method=local", out="other")
    Path("c/local,seed=1/result.json").unlink()
    page = Path("c/report.html").read_text()
    assert execute(["report", "c", "other", "--out", "both"]) == 0
    unfinished, differing = capsys.readouterr().err.splitlines()
    assert unfinished == "fedspd: 'c/local,seed=1' is left out: the run is not finished."
    assert differing.startswith(
        "fedspd: 'other' is left out: its data differ from those of 'c/fedspd,seed=0' "
        "(mixture: parity instead of rotation"
    )
    assert Path("c/report.html").read_text() == page
    assert execute(["report", "c"]) == 0
    assert Path("c/report.html").read_text() != page


def test_report_shows_newcomers(capsys):
    run_quickly(*TINY, "holdout_clients=2", out="a")
    assert execute(["report", "a"]) == 0
    assert "newcomers (%)" in capsys.readouterr().out


def test_report_shows_the_rmse_of_newcomers_of_a_regression(regression, capsys):
    words = ["run", *regression, "method=local", "holdout_clients=2", "--workers", "1"]
    assert execute([*words, "--out", "r"]) == 0
    newcomers = read_result("r")["newcomers"]
    rmse = np.mean(newcomers["rmse"])
    assert f"local: newcomers have an RMSE of {rmse:.3g} on average" in capsys.readouterr().out
    assert execute(["report", "r", "--out", "rep"]) == 0
    assert "newcomers' RMSE" in capsys.readouterr().out
    (row,) = csv.DictReader(Path("rep/report.csv").read_text().splitlines())
    assert float(row["rmse_newcomers"]) == pytest.approx(rmse)
    assert float(row["newcomers_test_loss"]) == pytest.approx(np.mean(newcomers["test_loss"]))


# ---- the demo


@pytest.mark.long
@pytest.mark.usefixtures("real_figures")
def test_demo_finds_two_populations_and_is_ahead_of_all_others(capsys):
    assert execute(["demo", "--out", "demo", "--workers", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 5
    for row in found["rows"][1:]:
        assert row["difference"]["mean"] + row["difference"]["half"] < 0
    assert (found["advice"]["method"], found["advice"]["sureness"]) == ("fedspd-split", "Sure")
    assert found["advice"]["signs"]["clusters"] == 2
    assert Path("demo/figures/network.png").exists()


# ---- wrong input

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
    "another method's option of fedspd": (
        ["compare", "fedspd.lambda=3"],
        "fedspd.lambda: unknown key; 'lambda' is an option of fedsoft, pfedme.",
    ),
    "no method": (
        ["compare", "--methods", ","],
        "methods = []: too few; expected at least one method.",
    ),
    "no config": (
        ["compare", "none.toml"],
        "config = 'none.toml': no such file; expected a TOML file, and KEY=VALUE ",
    ),
    "unknown method of advise": (["advise", "fedavg.finetun=3"], "fedavg.finetun: unknown key; "),
    "no config of advise": (
        ["advise", "none.toml"],
        "config = 'none.toml': no such file; expected a TOML file, and KEY=VALUE ",
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
def test_wrong_input_is_rejected_in_one_sentence_and_writes_nothing(name, capsys, here):
    words, sentence = BAD[name]
    assert execute(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("fedspd: ")
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("command", ["compare", "sweep", "advise"])
def test_option_of_a_method_that_does_not_run_is_refused(command, capsys, here):
    grid = ["topology.kind=ring,star"] if command == "sweep" else []
    methods = ["--methods", "fedavg,local"] if command != "advise" else []
    words = [command, *grid, "pfedme.lambda=3", *methods]
    assert execute(words) == 2
    printed = capsys.readouterr()
    assert "pfedme.lambda = 3.0: an option of 'pfedme' only, and methods = " in printed.err
    assert printed.err.count("\n") == 1
    assert list(here.iterdir()) == []


# ---- interruption

GATED = ["compare", *PLAIN, "--methods", "gated:Gated,local", "--seeds", "1", "--workers", "2"]


def test_compare_says_how_to_continue_after_a_run_was_killed(here, gate):
    command = Command(GATED, here / "log")
    os.kill(gate.wait(), signal.SIGKILL)
    assert command.end() == 1
    (folder,) = Path("runs").iterdir()
    assert f"Continue with: fedspd {' '.join(GATED)} --out {folder}\n" in command.stderr
    assert "' ended with exit code -9" in command.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_compare_says_how_to_continue_after_a_signal_and_continues(number, here, gate):
    words = [*GATED, "--out", "c"]
    command = Command(words, here / "log")
    gate.wait()
    command.ctrl_c() if number == signal.SIGINT else command.signal(number)
    assert command.end() == 130
    assert "Traceback" not in command.stderr
    assert f"Continue with: fedspd {' '.join(words)}\n" in command.stderr
    assert not (here / "c" / "report.html").exists()
    gate.open()
    assert execute(words) == 0
    assert len(list(here.glob("c/*/result.json"))) == 2
    assert (here / "c" / "report.html").exists()
