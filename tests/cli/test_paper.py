"""fedspd paper: list, show, run, continue, and go on after what is missing."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedspd.cli.main import execute
from fedspd.paper.definition import experiment_names

pytestmark = pytest.mark.usefixtures("here")
TINY = ["--scale", "tiny", "--out", "p", "--workers", "1"]
QUICK = {"mnist-100", "table-communication"}
ALL = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.long)
    for name in experiment_names()
]
OWN = """
title = "Own"
source = "Own table"
says = "nothing"

[config]
clients = 4
rounds = 3
data = { name = "digits", examples = 20, test_examples = 10 }
topology = { kind = "ring" }
training = { epochs = 1, batch = 10 }
fedspd = { final_epochs = 1 }

[[rows]]
name = "digits"

[[columns]]
name = "FedSPD"
config = { method = "fedspd" }

[[columns]]
name = "Local"
config = { method = "local" }

[values]
digits = [80.0, 60.0]

[[figures]]
name = "by-round"
kind = "curves"
caption = "Accuracy by round."
"""


@pytest.fixture
def own(here):
    """Write an experiment of one's own, and return its path."""
    path = here / "own.toml"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("name", ALL)
def test_paper_runs_every_experiment_at_the_tiny_scale(name, capsys):
    assert execute(["paper", name, *TINY]) == 0
    folder = Path("p/reports") / f"{name}.tiny"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"report.html", "report.md", "report.csv", "report.tex", "report.json"}
    assert "not run" not in (folder / "report.md").read_text()
    capsys.readouterr()
    assert execute(["paper", name, *TINY, "--json"]) == 0  # from the records
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missing"] == {}


def test_paper_lists_experiments_with_hours_at_each_scale(capsys, monkeypatch):
    monkeypatch.setattr("fedspd.paper.hours.step_seconds", lambda config: 0.01)
    assert execute(["paper", "--json", "--workers", "2"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    hours = rows["table-topology"]["hours"]
    # 15 cells x 5 seeds x 50 clients x 12 batches x (5 x 151 + 10) epochs
    assert hours["paper"] == pytest.approx(15 * 5 * 50 * 12 * 765 * 0.01 / 2 / 3600)
    assert hours["tiny"] < hours["small"] < hours["paper"]
    assert "emnist-letters" in rows["table-dfl"]["needs"]


def test_paper_shows_config_values_and_choices(capsys):
    assert execute(["paper", "show", "table-topology", "--scale", "paper"]) == 0
    shown = capsys.readouterr().out
    assert "clients = 50" in shown
    assert "92.86" in shown
    assert "Left open:" in shown


def test_own_experiment_gives_tables_in_five_formats_and_a_figure(own):
    assert execute(["paper", "own.toml", *TINY]) == 0
    folder = Path("p/reports/own.tiny")
    rows = list(csv.DictReader((folder / "report.csv").open()))
    assert [(row["column"], row["paper"]) for row in rows] == [
        ("FedSPD", "80.0"),
        ("Local", "60.0"),
    ]
    document = json.loads((folder / "report.json").read_text())
    gap = document["gaps"][0]
    ours = [cell["ours"] for cell in document["cells"]]
    assert gap["paper"] == -20
    assert gap["ours"] == pytest.approx(ours[1] - ours[0])
    assert r"\begin{tabular}" in (folder / "report.tex").read_text()
    assert "data:image/svg" in (folder / "report.html").read_text()
    assert (folder / "figures/by-round.png").exists()


def test_paper_repeats_no_run_that_has_a_record(own):
    assert execute(["paper", "own.toml", *TINY]) == 0
    before = Path("p/results/own.tiny.json").read_bytes()
    shutil.rmtree("p/runs")
    shutil.rmtree("p/reports")
    assert execute(["paper", "own.toml", *TINY]) == 0
    assert not Path("p/runs").exists()
    assert Path("p/results/own.tiny.json").read_bytes() == before
    assert Path("p/reports/own.tiny/report.html").exists()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_paper_continues_after_kill_and_interrupt(number, own, gate, capsys):
    own.write_text(OWN.replace('"local"', '"gated:Gated"'))
    words = ["paper", "own.toml", *TINY]
    command = [sys.executable, "-m", "fedspd", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    gate.wait()
    process.send_signal(number)
    _, error = process.communicate()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "Continue with: fedspd paper own.toml" in error
    (finished,) = Path("p/runs").glob("*/result.json")
    when = finished.stat().st_mtime_ns
    gate.open()
    sys.path.insert(0, ".")
    try:
        assert execute(words) == 0
    finally:
        sys.path.remove(".")
    assert finished.stat().st_mtime_ns == when
    assert "not run" not in Path("p/reports/own.tiny/report.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("source =", "sorce =", "own: source: no value and no default"),
        ('name = "digits"\n', 'nam = "digits"\n', "own: rows.0.name: no value"),
        ("[values]", "[vlues]", "own: vlues: unknown key; did you mean 'values'?"),
        ("config = { method", "conifg = { method", "did you mean 'config'?"),
        ("rounds = 3", "ronds = 3", "own, digits, FedSPD: ronds: unknown key; did you mean 'roun"),
        ('name = "digits", ', 'name = "digit", ', "data.name = 'digit': not a dataset, "),
        (
            'name = "digits", ',
            'name = "mnist", ',
            "The dataset 'mnist' is not here: 'fedspd data g",
        ),
        ("[80.0, 60.0]", "[80.0]", "own: values.digits: 1 values; expected one for each of the 2"),
        ('kind = "curves"', 'kind = "pie"', 'own: figures.0.kind = "pie": unknown value'),
        ("title =", "title", "own: not valid TOML"),
    ],
)
def test_wrong_experiment_file_is_explained(old, new, sentence, own, capsys):
    assert old in OWN
    own.write_text(OWN.replace(old, new))
    assert execute(["paper", "own.toml", *TINY]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("p/runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["table-dlf"], "'table-dlf': unknown experiment; did you mean 'table-dfl'?"),
        (["gone.toml"], "'gone.toml': no such file; expected an experiment as TOML."),
        (["table-dfl", "--scale", "smal"], "--scale smal: unknown scale; did you mean 'small'?"),
        (["table-dfl", "--reading", "txt"], "--reading txt: unknown reading; did you mean 'text'?"),
        (["table-dfl", "fig", "x"], "table-dfl fig x: too many words"),
    ],
)
def test_wrong_words_are_explained(words, sentence, capsys):
    assert execute(["paper", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_all_goes_on_after_an_error_and_says_what_is_missing(own, capsys, monkeypatch):
    names = ["table-topology", "gone.toml", "own.toml"]
    monkeypatch.setattr("fedspd.cli.paper.experiment_names", lambda: names)
    # the theorems take minutes at this scale; tests/paper measures them at a smaller one
    monkeypatch.setattr("fedspd.cli.paper._run_theory", lambda *_, **__: None)
    words = ["paper", "all", "--scale", "small", "--out", "p", "--workers", "1"]
    assert execute(words) == 1
    error = capsys.readouterr().err
    assert "fedspd: gone.toml is not complete: 'gone.toml': no such file" in error
    line = next(line for line in error.splitlines() if "no row" in line)
    assert re.search("table-topology has no row ER, BA, RGG. .*'fedspd data get mnist'", line)
    assert "not run: no data" in Path("p/reports/table-topology.small/report.md").read_text()
    assert "not run" not in Path("p/reports/own.small/report.md").read_text()
