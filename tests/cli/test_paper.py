"""fedspd paper: list, show, run, continue, and go on after what is missing."""

import csv
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from chaos.commands import Command
from fedspd.cli import paper_list
from fedspd.cli.main import execute
from fedspd.paper.definition import experiment_names, load_experiment
from fedspd.paper.hours import hours_of
from fedspd.storage.atomic import read_json

pytestmark = pytest.mark.usefixtures("here", "blank_figures")
NAMES = [*experiment_names(), "theory"]
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


@pytest.fixture
def timed(monkeypatch):
    """Let a gradient step take ten milliseconds, and the theory an hour."""
    monkeypatch.setattr("fedspd.paper.hours.step_seconds", lambda config: 0.01)
    monkeypatch.setattr("fedspd.paper.theory_report.estimate_hours", lambda scale: 1.0)


def test_paper_lists_experiments_with_hours_at_each_scale(capsys, timed):
    assert execute(["paper", "--json", "--workers", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["experiments"]}
    hours = rows["table-topology"]["hours"]
    # 15 cells x 5 seeds x 50 clients, 12 batches, 8 of a cluster; 5 x 151 and 10 epochs with
    # gradients; without: two losses in 150 rounds, and 31 evaluations, also of the test's batches
    passes = 150 * 2 * 12 + 31 * (12 + 6)
    steps = 15 * 5 * 50 * (8 * 755 + 12 * 10 + 0.3 * passes)
    assert hours["paper"] == pytest.approx(steps * 0.01 / 2 / 3600)
    assert hours["tiny"] < hours["small"] < hours["paper"]
    assert "emnist-letters" in rows["table-dfl"]["needs"]
    assert rows["table-mobilenet"]["data"] == ["cifar10", "mnist", "fashion-mnist", "cifar100"]
    assert rows["table-topology"]["source"] == "Table 4, Figure 8"
    apart = sum(row["hours"]["small"] for row in rows.values())
    assert max(row["hours"]["small"] for row in rows.values()) < found["hours"]["small"] < apart


@pytest.mark.parametrize(
    ("present", "counted"),
    [
        ({"mnist", "fashion-mnist"}, {"mnist", "fashion-mnist"}),
        ({"mnist", "emnist-letters"}, {"emnist-letters"}),
    ],
)
def test_hours_count_stand_ins_where_data_are_missing(present, counted, monkeypatch):
    monkeypatch.setattr("fedspd.cli.paper_list.is_present", lambda name: name in present)
    runs = paper_list._runs(load_experiment("fig-clients"), "small")
    assert {config.data.name for config in runs} == counted
    assert len(runs) == 7 * len(counted)


def test_small_scale_takes_less_than_six_hours_on_two_slow_cores(capsys, monkeypatch):
    """Seconds of a gradient step as on a busy core of 2026; shared runs count once."""
    seconds = {"cnn": 0.013, "mobilenet-v2": 1.3}
    step = lambda config: seconds[config.model.name or "cnn"]  # noqa: E731
    monkeypatch.setattr("fedspd.paper.hours.step_seconds", step)
    configs = [c for name in experiment_names() for c in _configs(load_experiment(name), "small")]
    assert hours_of(configs, workers=2) < 5.5  # the theory takes the rest


def _configs(experiment, scale):
    return [config for cell in experiment.cells(scale) for config in cell.configs]


@pytest.mark.parametrize("width", [80, 210])
def test_list_fits_into_the_terminal(width, capsys, timed, monkeypatch):
    monkeypatch.setattr("fedspd.cli.paper_list.wide_console", lambda is_stderr: _terminal(width))
    assert execute(["paper", "--workers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    about = {name: [line for line in lines if line.split()[:1] == [name]] for name in NAMES}
    assert all(len(found) == 1 for found in about.values())  # a name is neither cut nor repeated
    assert len(lines) < (3 if width == 80 else 2) * len(NAMES)
    assert "…" not in "".join(lines)
    assert any(line.startswith("All together, with shared runs once:") for line in lines)


def _terminal(width):
    return Console(force_terminal=True, width=width, color_system=None)


def test_paper_shows_config_values_and_choices(capsys):
    assert execute(["paper", "show", "table-topology", "--scale", "paper"]) == 0
    shown = capsys.readouterr().out
    assert "clients = 50" in shown
    assert "92.86" in shown
    assert "Left open:" in shown


@pytest.mark.usefixtures("real_figures")
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


EPOCHS = """
[[columns]]
name = "{0} epochs"
config = {{ method = "fedspd", fedspd = {{ final_epochs = {0} }} }}
"""


def test_paper_trains_the_rounds_before_the_final_phase_once(own, capsys):
    first = OWN.index("[[columns]]")
    columns = "".join(EPOCHS.format(count) for count in (0, 1, 2))
    own.write_text(OWN[:first] + columns + OWN[OWN.index("[[figures]]") :])
    assert execute(["paper", "own.toml", *TINY]) == 0
    about = [read_json(path) for path in Path("p/runs").glob("*/run.json")]
    assert len({one["rounds_from"] for one in about if "rounds_from" in one}) == 1
    assert sum("rounds_from" in one for one in about) == 2
    assert not list(Path("p/runs").glob("*/checkpoints"))
    runs = read_json(Path("p/results/own.tiny.json"))["runs"]
    assert len({run["before"] for run in runs}) == 1
    assert len({run["hash"] for run in runs}) == 3


@pytest.mark.long
def test_paper_gives_the_same_runs_on_ray(own):
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    assert execute(["paper", "own.toml", *TINY]) == 0
    words = ["paper", "own.toml", "--scale", "tiny", "--out", "q", "--engine", "ray"]
    assert execute([*words, "--workers", "2"]) == 0
    paths = [Path(out, "results/own.tiny.json") for out in "pq"]
    here, there = ([run["hash"] for run in read_json(path)["runs"]] for path in paths)
    assert here == there


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_paper_continues_after_kill_and_interrupt(number, own, gate, capsys):
    own.write_text(OWN.replace('"local"', '"gated:Gated"'))
    words = ["paper", "own.toml", *TINY]
    command = Command(words, Path("log"))
    gate.wait()
    command.signal(number)
    code = command.end()
    if number == signal.SIGINT:
        assert code == 130
        assert "Continue with: fedspd paper own.toml" in command.stderr
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
        (["show"], "show: no experiment; expected one, such as 'show table-dfl'."),
        (["teory"], "'teory': unknown experiment; did you mean 'theory'?"),
        (["table-dfl", "--engine", "rya"], "engine = 'rya': unknown engine; did you mean 'ray'?"),
        (["table-dfl", "--address", "auto"], "address = 'auto': only engine = 'ray' has an addr"),
        (["table-dfl", "--device", "tpu"], "device = 'tpu': expected auto, cpu, or cuda where th"),
    ],
)
def test_wrong_words_are_explained(words, sentence, capsys):
    assert execute(["paper", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_all_goes_on_after_an_error_and_says_what_is_missing(own, capsys, monkeypatch):
    names = ["table-topology", "gone.toml", "own.toml"]
    monkeypatch.setattr("fedspd.cli.paper.experiment_names", lambda: names)
    # the theorems take minutes at this scale; tests/paper measures them at a smaller one
    monkeypatch.setattr("fedspd.cli.paper._run_theory", lambda order: None)
    words = ["paper", "all", "--scale", "small", "--out", "p", "--workers", "1"]
    assert execute(words) == 1
    error = capsys.readouterr().err
    assert "fedspd: gone.toml is not complete: 'gone.toml': no such file" in error
    line = next(line for line in error.splitlines() if "no row" in line)
    assert re.search("table-topology has no row ER, BA, RGG. .*'fedspd data get mnist'", line)
    assert "not run: no data" in Path("p/reports/table-topology.small/report.md").read_text()
    assert "not run" not in Path("p/reports/own.small/report.md").read_text()
