"""fedspd data list, get and info."""

import gzip
import json
import struct

import numpy as np
import pytest
from typer.testing import CliRunner

from fedspd.cli.data import app
from fedspd.core.errors import DataError
from fedspd.data.sources import DATASETS


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSPD_DATA", str(tmp_path / "data"))
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def mnist_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    for file in DATASETS["mnist"].files:
        array = np.zeros((2, 28, 28)) if "images" in file else np.array([1, 3])
        content = (
            struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
            + array.astype(np.uint8).tobytes()
        )
        (tmp_path / "mine" / file).write_bytes(gzip.compress(content))
    return tmp_path / "mine"


def test_list_shows_all_datasets(run, tmp_path):
    result = run("list")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in DATASETS)
    assert "124,800" in result.stdout
    assert "1 x 28 x 28" in result.stdout
    rows = json.loads(run("list", "--json").stdout)
    assert rows["folder"] == str(tmp_path / "data")
    assert {row["name"]: row["present"] for row in rows["datasets"]} == {
        name: name == "digits" for name in DATASETS
    }
    assert rows["datasets"][0] == {
        "name": "digits",
        "classes": 10,
        "shape": [1, 8, 8],
        "train": 1442,
        "test": 355,
        "present": True,
    }


def test_get_imports_files_and_warns_that_they_are_not_official(run, tmp_path, mnist_folder):
    result = run("get", "mnist", "--from", mnist_folder)
    assert result.exit_code == 0
    assert f"mnist is ready in {tmp_path / 'data' / 'mnist'}." in result.stdout
    assert result.stderr.count("not the official content") == 4
    facts = json.loads(run("info", "mnist", "--json").stdout)
    assert (facts["train"], facts["test"], facts["shape"], facts["classes"]) == (
        2,
        2,
        [1, 28, 28],
        10,
    )
    assert facts["per_class"] == {
        "train": [0, 1, 0, 1, 0, 0, 0, 0, 0, 0],
        "test": [0, 1, 0, 1, 0, 0, 0, 0, 0, 0],
    }
    assert facts["folder"] == str(tmp_path / "data" / "mnist")
    assert "mnist" in [
        row["name"]
        for row in json.loads(run("list", "--json").stdout)["datasets"]
        if row["present"]
    ]


def test_get_writes_into_another_folder(run, tmp_path, mnist_folder):
    assert (
        run("get", "mnist", "--from", mnist_folder, "--folder", tmp_path / "other").exit_code == 0
    )
    assert (tmp_path / "other" / "mnist" / "train-images-idx3-ubyte.gz").is_file()
    assert run("info", "mnist", "--folder", tmp_path / "other").exit_code == 0


def test_get_digits_has_nothing_to_do(run):
    result = run("get", "digits")
    assert result.stdout == "digits is ready.\n"
    assert "part of scikit-learn" in result.stderr


def test_info_shows_facts_and_a_table(run):
    result = run("info", "digits")
    assert result.exit_code == 0
    for line in ("train    1,442", "shape    1 x 8 x 8", "folder   -", "classes  10"):
        assert line in result.stdout
    assert "│ 9     │ 144   │ 36   │" in result.stdout


def test_info_reads_a_users_own_regression(run, tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((10, 3)), y=np.zeros(10))
    facts = json.loads(run("info", tmp_path / "mine.npz", "--json").stdout)
    assert (facts["name"], facts["classes"], facts["train"], facts["folder"]) == (
        "mine",
        0,
        8,
        None,
    )
    assert run("info", tmp_path / "mine.npz").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("info", "mnist"), "fedspd data get mnist"),
        (("info", "mnits"), "did you mean 'mnist'"),
        (("get", "cifar"), "did you mean 'cifar10'"),
        (("get", "mnist", "--from", "nowhere"), "'nowhere': no file train-images-idx3-ubyte.gz"),
    ],
)
def test_errors_reach_the_main_program(run, arguments, sentence):
    result = run(*arguments)
    assert isinstance(result.exception, DataError)
    assert sentence in str(result.exception)
