"""Every example runs as its docstring says, in an empty folder, and prints what it promises."""

import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest

from fedspd.cli.main import execute
from fedspd.config import load

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.toml"))
ON_DIGITS = ["own_npz", "own_image_folder", "own_torch_dataset"]


def run_example(name: str, folder: Path) -> str:
    """Return what an example prints. It runs in this process: a new one takes long to begin."""
    printed = io.StringIO()
    with chdir(folder), redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert not list(folder.iterdir()), "an example leaves nothing behind"
    return printed.getvalue()


def run_config(name: str, folder: Path, *settings: str) -> dict:
    printed = io.StringIO()
    words = ["run", str(EXAMPLES / f"{name}.toml"), *settings]
    with chdir(folder), redirect_stdout(printed):
        assert execute([*words, "--workers", "1", "--out", "run", "--json"]) == 0
    return json.loads(printed.getvalue().splitlines()[-1])


def percentages(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+)%", text)]


def test_suite_runs_every_example():
    run_here = {
        *ON_DIGITS,
        "own_model",
        "own_adapter",
        "own_method",
        "own_arrays",
        "own_function",
        "callback",
        "regression",
        "own_clients",
        "own_text",
        "own_sensors",
    }
    assert {path.stem for path in EXAMPLES.glob("*.py")} == run_here
    assert {path.stem for path in CONFIGS} == {
        "own_function",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "plant",
    }


@pytest.mark.parametrize(
    "name", ["own_npz", *(pytest.param(name, marks=pytest.mark.long) for name in ON_DIGITS[1:])]
)
def test_example_learns_digits_as_a_program(name, tmp_path):
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_digits_learned(done.stdout)
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_own_model_learns_and_ends_as_an_ordinary_module(tmp_path):
    printed = run_example("own_model", tmp_path)
    assert_digits_learned(printed)
    assert "Conv2d(1, 16" in printed


@pytest.mark.long
def test_own_adapter_learns_and_sends_adapters_alone(tmp_path):
    printed = run_example("own_adapter", tmp_path)
    assert min(percentages(printed)) > 70  # guessing: 10 %
    # two adapters of rank 4: 4 x 64 and 64 x 4 each; a head of 64 x 10 and 10
    assert "1674 of 9994 parameters travel" in printed
    assert "1024 of 9994 parameters travel" in printed


def assert_digits_learned(printed: str) -> None:
    assert "mean over 8 clients" in printed
    assert percentages(printed)[0] > 85  # guessing: 10 %


def test_own_method_learns_beside_fedavg(tmp_path):
    ditto, fedavg = run_example("own_method", tmp_path).splitlines()
    assert ditto.startswith("own_method:Ditto")
    assert_digits_learned(ditto)
    assert_digits_learned(fedavg)


def test_own_arrays_score_every_client(tmp_path):
    scores = percentages(run_example("own_arrays", tmp_path))
    assert len(scores) == 8 + 1
    assert scores[-1] == pytest.approx(
        sum(scores[:-1]) / 8, abs=0.6
    )  # the clients' are rounded to whole numbers
    assert scores[-1] > 85  # guessing the larger class: 63 %


def test_own_clients_are_those_of_the_table(tmp_path):
    *clients, mean, first = run_example("own_clients", tmp_path).splitlines()
    assert [line.partition(":")[0] for line in clients] == [f"cellar {i}" for i in range(6)]
    assert percentages(mean)[0] > 85  # guessing: 40 %
    assert first == "The first wine is a Barolo."


def test_own_text_is_learned_as_bags_and_as_embeddings(tmp_path):
    bags, embeddings = run_example("own_text", tmp_path).splitlines()
    assert bags.endswith("classes food, music, sport")
    assert percentages(bags)[0] > 90
    assert percentages(embeddings)[0] > 90


def test_own_sensors_need_the_scale_of_their_device(tmp_path):
    plain, scaled = map(percentages, run_example("own_sensors", tmp_path).splitlines())
    assert scaled[0] > 80  # guessing: 33 %
    assert scaled[0] > plain[0] + 5


def test_callback_prints_every_round_and_fedspd_beats_local_only_training(tmp_path):
    *rounds, comparison, sent = run_example("callback", tmp_path).splitlines()
    assert [int(line.split(":")[0].removeprefix("round")) for line in rounds] == list(range(1, 11))
    together, alone = percentages(comparison)
    assert together > alone + 3
    assert re.fullmatch(r"Sent: \d+ models, [\d.]+ MB", sent)


def test_regression_finds_both_slopes_at_every_client(tmp_path):
    printed = run_example("regression", tmp_path)
    found = sorted(
        [float(number) for number in re.findall(r"-?\d\.\d\d", line)]
        for line in printed.splitlines()
    )
    assert found[0] == pytest.approx([-1, -1, -1], abs=0.1)
    assert found[1] == pytest.approx([2, 2, 2], abs=0.1)


@pytest.mark.long
def test_plant_clients_learn_from_one_another(tmp_path):
    summary = run_config("plant", tmp_path)
    (tmp_path / "run").rename(tmp_path / "together")
    alone = run_config("plant", tmp_path, "method=local")
    assert summary["accuracy"]["mean"] > alone["accuracy"]["mean"] + 0.05


@pytest.mark.usefixtures("blank_figures")
def test_own_function_is_found_in_the_current_folder(tmp_path):
    shutil.copy(EXAMPLES / "own_function.py", tmp_path)
    summary = run_config("own_function", tmp_path)
    assert summary["rounds"] == 10
    assert summary["accuracy"]["mean"] > 0.8  # guessing: 50 %
    assert "own_function:tanh_net" in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_example_configs_are_valid(path):
    expected = "fedspd-split" if path.stem == "own_function" else "fedspd"
    assert load(path).method == expected


def test_mnist_config_has_twenty_clients_with_six_neighbours_each():
    config = load(EXAMPLES / "mnist.toml")
    assert (
        config.clients,
        config.rounds,
        config.data.examples,
        config.topology.kind,
        config.topology.degree,
    ) == (20, 30, 300, "er", 6)


@pytest.mark.skipif(
    not os.environ.get("FEDSPD_DATA"),
    reason="needs the real files: set FEDSPD_DATA to their folder",
)
def test_mnist_trains_on_the_real_data(tmp_path):
    quicker = [
        "training.epochs=1",
        "training.lr=0.2",
        "training.batch=20",
        "fedspd.warmup=2",
        "fedspd.final_epochs=1",
    ]
    summary = run_config("mnist", tmp_path, "rounds=2", *quicker)
    assert summary["rounds"] == 2
    assert summary["models_sent"] > 0
    assert summary["accuracy"]["mean"] > 0.5  # guessing: 10 %


@pytest.mark.usefixtures("blank_figures")
def test_tutorial_runs_from_own_data_to_a_report(monkeypatch):
    """The cells in order, in one namespace, as a notebook runs them."""
    import json

    path = Path(__file__).parents[1] / "examples" / "tutorial.ipynb"
    cells = json.loads(path.read_text("utf-8"))["cells"]
    assert len(cells) == 10
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    compared = names["compared"]
    split, *others = compared.rows()
    assert [row["method"] for row in (split, *others)] == ["fedspd-split", "fedavg", "local"]
    assert all(split["accuracy"] > row["accuracy"] + 0.1 for row in others)
    assert (compared.folder / "report.html").exists()
    assert names["result"].summary["best_round"] >= 1
    shown = compared.figures()["accuracy-by-round"]  # the last cell
    monkeypatch.undo()  # a real figure
    assert shown._repr_png_().startswith(b"\x89PNG"), "a notebook shows it without pyplot"
