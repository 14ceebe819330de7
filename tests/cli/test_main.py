"""The command line: its imports, its errors and its exit codes."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedspd
from fedspd.algorithms import METHODS
from fedspd.cli.main import EXIT_CODES, execute
from fedspd.core.imports import quick_imports

PROGRAM = str(Path(sys.executable).with_name("fedspd"))


HELP = [
    ["--help"],
    ["run", "--help"],
    ["bench", "--help"],
    ["data", "--help"],
    ["topology", "show", "--help"],
    ["methods"],
]


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from fedspd.cli.main import execute; "
        f"codes = [execute(words) for words in {HELP}]; print('IMPORTED', codes, *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    printed = done.stdout.rpartition("IMPORTED")[2]
    assert printed.startswith(f" {[0] * len(HELP)} "), done.stderr
    heavy = {"torch", "scipy", "numpy", "networkx", "matplotlib", "sklearn"}
    assert not heavy & set(printed.split())


def test_command_imports_without_the_garbage_collector():
    """The first collection comes after the imports, and passes none of their objects."""
    code = (
        "import gc, sys\n"
        "from fedspd.cli.main import execute\n"
        "found = []\n"
        "gc.callbacks.append(lambda *_: found.append('torch' in sys.modules))\n"
        "code = execute(['run', 'nothing.toml'])\n"
        "print(code, gc.isenabled(), gc.get_freeze_count() > 100_000, found.count(True))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    code, is_enabled, is_frozen, collections = done.stdout.split()
    assert (code, is_enabled, is_frozen) == ("2", "True", "True"), done.stderr
    assert int(collections) < 20  # hundreds while torch is imported


def test_collector_stays_as_it_is_in_a_process_with_torch():
    before = gc.get_freeze_count()
    with quick_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_help_documents_exit_codes():
    done = subprocess.run(
        [PROGRAM, "run", "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "300"},
    )
    assert done.returncode == 0
    assert EXIT_CODES in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--worker", "2"], "No such option: --worker"),
        (["run", "--workers", "0"], "--workers 0: expected a number greater than or equal to 1."),
        (["run", "--workers", "two"], "--workers two: expected an integer."),
        (["run", "--out"], "--out"),
        (["node", "run", "--bundle", "b", "--log", "xml"], "fedspd: --log: 'xml' is not one of"),
        (["rnu"], "No such command 'rnu'."),
        (["data", "gte"], "No such command 'gte'."),
    ],
)
def test_wrong_argument_is_rejected_in_one_line(arguments, sentence, capsys):
    assert execute(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fedspd: ")
    assert sentence in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["run", "--wokers", "2"], ["run", "rounds=0"], ["run", "--resume", "nowhere"]]
)
def test_error_ends_with_a_line_of_json_if_asked_for(arguments, capsys):
    assert execute([*arguments, "--json"]) == 2
    printed = capsys.readouterr()
    last = json.loads(printed.out.splitlines()[-1])
    assert last["exit_code"] == 2
    assert printed.err == f"fedspd: {last['error']}\n"


@pytest.mark.parametrize("arguments", [[], ["data"], ["topology"]])
def test_missing_command_shows_help(arguments, capsys):
    assert execute(arguments) == 2
    printed = capsys.readouterr()
    assert "Usage" in printed.out + printed.err
    assert "Traceback" not in printed.err


def test_unexpected_error_shows_its_traceback_and_ends_with_1(tmp_path, monkeypatch, capsys):
    (tmp_path / "breaks.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__(64, classes)\n"
        "    def forward(self, x):\n"
        "        assert not self.training, 'not today'\n"
        "        return super().forward(x.flatten(1))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "breaks", raising=False)
    settings = ["clients=4", "rounds=1", "data.examples=20", "topology.degree=2"]
    words = ["run", *settings, "model.name=breaks:Net", "--out", "a", "--workers", "1", "--json"]
    assert execute(words) == 1
    printed = capsys.readouterr()
    assert "Traceback" in printed.err
    assert "breaks.py" in printed.err
    assert json.loads(printed.out.splitlines()[-1]) == {
        "error": "AssertionError: not today",
        "exit_code": 1,
    }


def test_ctrl_c_that_an_import_turns_into_another_error_stops_the_command(
    tmp_path, monkeypatch, capsys
):
    """As numpy does, whose modules are half there then."""
    (tmp_path / "turns.py").write_text(
        "import signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    raise RuntimeError from None\n"
    )
    monkeypatch.chdir(tmp_path)
    assert execute(["run", "model.name=turns:Net", "--out", "a"]) == 130
    assert capsys.readouterr().err == "fedspd: Stopped.\n"


def test_methods_shows_all_with_their_options(capsys):
    assert execute(["methods"]) == 0
    table = capsys.readouterr().out
    assert execute(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == list(METHODS)
    assert all(name in table and listed[name]["about"] for name in METHODS)
    assert listed["fedspd"]["options"]["final_epochs"] == 10
    assert "lambda" in listed["pfedme"]["options"]
    assert "None" not in table  # an option without a default is "not set"


@pytest.mark.parametrize("words", ["methods --json", "data list"])  # print, and rich
def test_closed_output_is_not_an_error(words):
    line = f"(PYTHONUNBUFFERED=1 {PROGRAM} {words}; echo $? >&2) | true"
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert done.stderr == "0\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux alone has /dev/full")
@pytest.mark.parametrize("words", [["methods"], ["methods", "--json"], ["data", "list"]])
def test_full_disk_under_the_output_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    sentence = "fedspd: The output could not be written: the disk is full. Make room.\n"
    assert (done.returncode, done.stderr) == (2, sentence)


def test_command_runs_with_closed_streams():
    closed = ["sh", "-c", 'exec "$0" methods <&- >&- 2>&-', PROGRAM]
    assert subprocess.run(closed).returncode == 0
    quiet = ["sh", "-c", 'exec "$0" run ronds=3 2>&-', PROGRAM]
    done = subprocess.run(quiet, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")


def test_version_shows_that_of_the_package():
    printed = [
        subprocess.run([sys.executable, *how, "--version"], capture_output=True, text=True).stdout
        for how in (["-m", "fedspd"], ["-c", "from fedspd.cli.main import main; main()"])
    ]
    assert printed == [f"{fedspd.__version__}\n"] * 2
