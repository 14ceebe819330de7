"""fedspd run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedspd
from fedspd.cli.main import execute
from fedspd.storage.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("here", "blank_figures")
PROGRAM = str(Path(sys.executable).with_name("fedspd"))
PLAIN = ["clients=6", "rounds=2", "data.examples=20", "training.epochs=1"]
TINY = [*PLAIN, "fedspd.final_epochs=1", "method=fedspd"]


def run_quickly(*settings, out):
    """Run without the figures of the command."""
    return fedspd.run(fedspd.load(overrides=[*TINY, *settings]), out=out)


@pytest.mark.usefixtures("real_figures")
def test_run_ends_with_one_line_of_json_and_complete_records(capsys):
    assert execute(["run", *TINY, "--out", "runs/a", "--workers", "2", "--json"]) == 0
    printed = capsys.readouterr()
    last = json.loads(printed.out)
    result = RunFolder.open(Path("runs/a")).read("result.json")
    assert last["folder"] == "runs/a"
    assert last["hash"] == result["hash"]
    assert last["accuracy"]["mean"] == pytest.approx(sum(result["clients"]["accuracy"]) / 6)
    documents = {"config.toml", "run.json", "partition.json", "topology.json", "result.json"}
    assert set(os.listdir("runs/a")) >= documents | {"events.jsonl"}
    figures = {"accuracy-by-round.png", "clients.png", "network.png"}
    assert set(os.listdir("runs/a/figures")) >= figures
    assert "fedspd" in printed.err  # the table is for people


def test_run_repeats_a_run_from_its_resolved_config(capsys):
    first = fedspd.run(fedspd.load(overrides=[*PLAIN, "seed=3", "method=fedavg"]), out="a")
    assert execute(["run", "a/config.toml", "--out", "b", "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hash"] == first.summary["hash"]
    assert Path("a/config.toml").read_text() == Path("b/config.toml").read_text()


def test_run_without_out_has_a_new_folder(capsys):
    for number in (1, 2):
        assert execute(["run", *PLAIN, "rounds=1", "method=local", "--workers", "1"]) == 0
        assert f"runs/local-digits-{number}" in capsys.readouterr().out
    assert sorted(os.listdir("runs")) == ["local-digits-1", "local-digits-2"]


def test_run_has_the_graph_that_topology_show_describes(capsys):
    run_quickly("topology.degree=3", "topology.kind=rgg", out="a")
    assert execute(["topology", "show", "a/config.toml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    recorded = RunFolder.open(Path("a")).read("topology.json")
    assert {key: value for key, value in recorded.items() if key != "list"} == shown


@pytest.mark.parametrize(
    "settings",
    [
        ["clients=1"],
        ["clients=2", "topology.kind=star"],
        ["clusters=1"],
        ["evaluate_every=5"],
        ["clusters=4"],
    ],
)
def test_run_takes_small_and_odd_networks(settings):
    assert run_quickly(*settings, out="a").summary["rounds"] == 2
    for path in Path("a").glob("*.json*"):
        assert "NaN" not in path.read_text()
        assert "Infinity" not in path.read_text()


# ---- wrong input


BAD = {
    "misspelt key": (["topolgy.degree=4"], "topolgy: unknown key; did you mean 'topology'?"),
    "wrong type": (["rounds=many"], 'rounds = "many": expected an integer.'),
    "p > 1": (
        ["topology.probability=1.5"],
        "topology.probability = 1.5: expected a number less than or equal to 1.",
    ),
    "S > examples": (
        ["clusters=21"],
        "clusters = 21: a client has only 20 examples; expected at most one cluster per example.",
    ),
    "degree >= N": (
        ["topology.degree=6"],
        "topology.degree = 6: too large for clients = 6; expected at most 5.",
    ),
    "more clients than examples": (["clients=2000"], "clients + holdout_clients = 2000: "),
    "missing dataset": (["data.name=mnist"], "fedspd data get mnist"),
    "unknown dataset": (["data.name=minst"], "did you mean 'mnist'?"),
    "unknown method": (
        ["method=fedsdp"],
        "method = 'fedsdp': unknown method; did you mean 'fedspd'?",
    ),
    "unknown model": (["model.name=cmn"], "did you mean 'cnn'?"),
    "unknown kind": (
        ["topology.kind=rnig"],
        "topology.kind = \"rnig\": unknown value; expected 'er', 'ba', 'rgg', 'ring', ",
    ),
    "unknown mixture": (
        ["data.mixture=rotatoin"],
        "data.mixture = \"rotatoin\": unknown value; expected 'rotation', 'parity', ",
    ),
    "unknown device": (
        ["device=gpu"],
        "device = 'gpu': expected auto, cpu, or cuda where there is one.",
    ),
    "no such device": (
        ["device=meta"],
        "device = 'meta': expected auto, cpu, or cuda where there is one.",
    ),
    "loss without sense": (
        ["loss=squared_error"],
        "loss = 'squared_error': expected cross_entropy for data with classes, or auto.",
    ),
    "model too large": (
        ["model.hidden=100000000000"],
        "model.name = 'mlp': its parameters do not fit into memory. Choose a smaller model.\n",
    ),
    "a module that is not there": (["model.name=nosuch:Net"], "No module named 'nosuch'"),
    "too many examples": (["data.examples=10000"], "data.examples = 10000"),
    "an extra": (
        ["--tensorboard"],
        "TensorBoard needs the extra 'tensorboard', which is not installed: "
        "pip install 'fedspd[tensorboard]'.",
    ),
    "no config": (["--", "nosuch=1"], "nosuch: unknown key; "),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_rejected_in_one_sentence_and_writes_nothing(name, capsys, here):
    settings, sentence = BAD[name]
    if name == "an extra" and shutil.which("tensorboard"):
        pytest.skip("the extra is installed")
    assert execute(["run", "--out", "runs/a", "--workers", "2", *TINY, *settings]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("fedspd: ")
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert list(here.iterdir()) == []


@pytest.mark.usefixtures("real_figures")
def test_run_of_one_client_draws_its_figures(capsys):
    assert execute(["run", *TINY, "clients=1", "--out", "a", "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2
    assert Path("a/figures/network.png").exists()


def test_installed_program_rejects_wrong_input(here):
    command = [PROGRAM, "run", *TINY, "data.examples=10000", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["exit_code"] == 2
    assert list(here.iterdir()) == []


def test_users_model_that_does_not_fit_the_data_is_rejected(capsys, here):
    (here / "mine.py").write_text(
        "from torch import nn\n"
        "def few(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n"
        "def narrow(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(32, classes))\n"
    )
    assert execute(["run", *TINY, "model.name=mine:few", "--out", "a"]) == 2
    assert capsys.readouterr().err == (
        "fedspd: model.name = 'mine:few': its output for 2 examples has shape (2, 3); "
        "expected (2, 10), a column for each class.\n"
    )
    assert execute(["run", *TINY, "model.name=mine:narrow", "--out", "a"]) == 2
    assert capsys.readouterr().err.startswith(
        "fedspd: model.name = 'mine:narrow': it does not work on examples of shape (1, 8, 8), "
        "with RuntimeError: mat1"
    )
    assert not (here / "a").exists()


def test_run_rejects_a_folder_that_holds_a_run(capsys):
    run_quickly(out="a")
    before = {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")}
    assert execute(["run", *TINY, "--out", "a"]) == 2
    assert capsys.readouterr().err == (
        "fedspd: 'a': the folder holds a run already; expected a new or an empty folder. "
        "Resume the run, or choose another folder.\n"
    )
    assert {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")} == before


def test_resume_rejects_a_folder_that_is_not_a_run(capsys, here):
    (here / "photos").mkdir()
    assert execute(["run", "--resume", "photos"]) == 2
    assert capsys.readouterr().err == (
        "fedspd: 'photos': not a run folder; expected a folder with run.json.\n"
    )
    assert list((here / "photos").iterdir()) == []


@pytest.mark.parametrize("command", [["run", "--resume"], ["report"]])
def test_command_rejects_a_run_folder_of_another_format(capsys, command):
    RunFolder.create(Path("a")).begin({"format": 2, "versions": {"fedspd": "0.9.5"}})
    assert execute([*command, "a"]) == 2
    assert capsys.readouterr().err == (
        "fedspd: 'a/run.json': format = 2, written by fedspd 0.9.5; expected 1. "
        "Install that version, or start again in another folder.\n"
    )


def test_resume_rejects_other_settings(capsys):
    assert execute(["run", "seed=3", "--resume", "a"]) == 2
    assert "--resume a: a run continues with its own config and folder." in capsys.readouterr().err


def test_dry_run_rejects_a_run_that_has_begun(capsys):
    assert execute(["run", "--resume", "a", "--dry-run"]) == 2
    assert "--resume a: a run that has begun is not estimated." in capsys.readouterr().err


def test_resume_rejects_a_changed_config(capsys):
    run_quickly(out="a")
    path = Path("a/config.toml")
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 5"))
    before = Path("a/events.jsonl").read_bytes()
    assert execute(["run", "--resume", "a"]) == 2
    error = capsys.readouterr().err
    sentence = "fedspd: 'a': the run was started with another config: rounds = 2, now 5. "
    assert error.startswith(sentence)
    assert error.count("\n") == 1
    assert Path("a/events.jsonl").read_bytes() == before
    path.write_text(path.read_text().replace("rounds = 5", "rounds = 2"))
    assert execute(["run", "--resume", "a", "--workers", "1"]) == 0


def test_resume_rejects_a_damaged_checkpoint(capsys):
    run_quickly(out="a")
    part = sorted(Path("a/checkpoints").rglob("*.safetensors"))[-1]
    part.write_bytes(part.read_bytes()[:-1])
    assert execute(["run", "--resume", "a"]) == 2
    assert f"fedspd: '{part}': checkpoint file missing or damaged" in capsys.readouterr().err


def test_resume_rejects_another_model_than_the_checkpoints(here):
    from torch import nn

    from fedspd.models.dense import MLP

    config = {"clients": 4, "rounds": 1, "data": {"examples": 20}, "topology": {"degree": 2}}
    fedspd.run(
        config,
        out="a",
        model=lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)),
    )
    with pytest.raises(fedspd.FedspdError, match="was started with another model"):
        fedspd.run(out="a", resume=True, model=lambda shape, classes: MLP(shape, classes))


def test_run_that_diverges_ends_with_3(capsys, here):
    settings = ["clients=3", "rounds=1", "data.examples=10", "method=fedavg", "training.lr=1e30"]
    assert execute(["run", *settings, "--out", "a", "--json"]) == 3
    printed = capsys.readouterr()
    assert "fedspd: The run diverged: 3 of 3 clients end with a loss that is not" in printed.err
    alarm = "The loss is not finite at clients 0, 1, 2: try a smaller training.lr."
    assert json.loads(printed.out.splitlines()[-1])["alarms"] == [alarm]


def test_override_of_another_method_is_rejected(capsys, here):
    assert execute(["run", "method=fedavg", "fedspd.warmup=3"]) == 2
    assert execute(["run", "method=fedavg", "options.mu=3"]) == 2
    Path("a.toml").write_text("[fedspd]\nwarmup = 3\n")
    assert execute(["run", "a.toml", "method=fedavg"]) == 2
    assert execute(["network", "create", "a.toml", "method=fedavg"]) == 2
    assert execute(["up", "a.toml", "method=fedavg"]) == 2
    with pytest.raises(fedspd.FedspdError, match=r"^fedspd.warmup = 3: an option of 'fedspd' only"):
        fedspd.run("a.toml")  # the default method is fedspd-split
    assert capsys.readouterr().err.count("=default.\n") == 5
    assert not list(here.glob("runs/*"))
