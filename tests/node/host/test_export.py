"""The export of a node's model and its predictions.

A network of one node needs no neighbours, so it runs in this process.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from fedspd.cli.main import execute
from fedspd.config import validate
from fedspd.core.errors import ConfigError, DataError, StorageError
from fedspd.data.federation import scale_inputs
from fedspd.node.host import export, local_network, provisioning, start
from fedspd.node.host.bundle import Bundle, open_bundle
from fedspd.node.peer.journal import Journal
from fedspd.storage.run_folder import RunFolder

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 1, 8, 8), dtype=np.uint8)
ONE_MODEL = ("fedspd", "fedavg", "fedsoft", "ifca", "pfedme", "local")
SEVERAL_MODELS = ("fedem",)


def create_bundle(folder: Path, method: str = "fedspd", **changes: Any) -> Bundle:
    tree = {
        "method": method,
        "clients": 1,
        "clusters": 1 if method in ("fedavg", "local") else 2,
        "rounds": 2,
        "topology": {"kind": "complete"},
        "data": {"name": "digits", "examples": 40},
        "model": {"name": "mlp", "hidden": 8},
    }
    local_network.create(validate({**tree, **changes}), folder)
    return open_bundle(folder / "nodes" / "node-0")


def train(folder: Path, method: str = "fedspd", **changes: Any) -> Bundle:
    """Run the only node of a network to its end."""
    bundle = create_bundle(folder, method, **changes)
    start.run(bundle)
    return bundle


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    np.savez(tmp_path / "x.npz", x=PIXELS)
    return tmp_path / "x.npz"


def onnx_scores(path: Path, x: torch.Tensor) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (scores,) = session.run(["y"], {"x": x.numpy()})
    return np.asarray(scores)


@pytest.mark.parametrize(
    "method",
    [m if m in ("fedspd", "ifca") else pytest.param(m, marks=pytest.mark.long) for m in ONE_MODEL],
)
def test_onnx_model_agrees_with_predict_for_any_number_of_examples(
    method: str, tmp_path: Path, examples: Path
) -> None:
    bundle = train(tmp_path / "plant", method)
    export.export(bundle, tmp_path / "model.onnx")
    expected = export.predict(bundle, examples).numpy()
    assert expected.shape == (7, 10)
    x = scale_inputs(PIXELS)
    for count in (1, 2, 7):
        np.testing.assert_allclose(
            onnx_scores(tmp_path / "model.onnx", x[:count]), expected[:count], atol=1e-5
        )


@pytest.mark.parametrize("name", ["cnn", pytest.param("mobilenet-v2", marks=pytest.mark.long)])
def test_onnx_model_for_images_agrees_with_predict(name: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (12, 1, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x=pixels, y=np.arange(12) % 3)
    np.savez(tmp_path / "x.npz", x=pixels)
    data = {"name": str(tmp_path / "own.npz"), "mixture": "iid", "examples": 8}
    bundle = train(
        tmp_path / "plant", rounds=1, data=data, model={"name": name}, fedspd={"final_epochs": 1}
    )
    export.export(bundle, tmp_path / "model.onnx")
    expected = export.predict(bundle, tmp_path / "x.npz").numpy()
    np.testing.assert_allclose(
        onnx_scores(tmp_path / "model.onnx", scale_inputs(pixels)), expected, atol=1e-4
    )


def test_safetensors_file_holds_the_weights_by_name(tmp_path: Path, examples: Path) -> None:
    bundle = train(tmp_path / "plant", dtype="float64")
    export.export(bundle, tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    module = export.personal_model(export.load_runner(bundle))
    assert weights.keys() == module.state_dict().keys()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float64}
    module.load_state_dict(weights)
    expected = export.predict(bundle, examples)
    torch.testing.assert_close(module(scale_inputs(PIXELS).double()).detach(), expected)


@pytest.mark.parametrize("method", SEVERAL_MODELS)
def test_method_with_several_models_predicts_but_does_not_export(
    method: str, tmp_path: Path, examples: Path
) -> None:
    bundle = train(tmp_path / "plant", method)
    assert export.predict(bundle, examples).shape == (7, 10)
    with pytest.raises(
        ConfigError,
        match=r"FedEM has no single model to export: .* use 'fedspd node predict'",
    ):
        export.export(bundle, tmp_path / "model.onnx")


def test_node_predicts_but_does_not_export_before_its_final_phase(
    tmp_path: Path, examples: Path
) -> None:
    bundle = train(tmp_path / "plant")
    run_folder = RunFolder(bundle.folder / "state")
    runner = export.load_runner(bundle)
    runner.begin()
    with run_folder.checkpoint(9, {"round": 9}) as folder:
        runner.save(folder)
    assert export.predict(bundle, examples).shape == (7, 10)
    with pytest.raises(ConfigError, match=r"FedSPD has no single model to export: .* Let the node"):
        export.export(bundle, tmp_path / "model.onnx")


@pytest.mark.parametrize("command", [["export", "--to", "model.onnx"], ["status"], ["run"]])
def test_command_refuses_a_journal_of_another_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    bundle = create_bundle(tmp_path / "plant")
    folder = RunFolder.create(bundle.folder / "state")
    folder.begin({"format": 2, "versions": {"fedspd": "0.9.5"}})
    folder.unlock()
    assert execute(["node", *command, "--bundle", str(bundle.folder)]) == 2
    assert "format = 2, written by fedspd 0.9.5; expected 1. Install" in capsys.readouterr().err


def test_export_refuses_a_wrong_target_and_a_missing_journal(tmp_path: Path) -> None:
    bundle = create_bundle(tmp_path / "plant")
    with pytest.raises(ConfigError, match=r"^'model.pt': expected a name that ends in .onnx or"):
        export.export(bundle, Path("model.pt"))
    with pytest.raises(ConfigError, match="there is no folder"):
        export.export(bundle, tmp_path / "none" / "model.onnx")
    with pytest.raises(StorageError, match=r"no journal of a node; .* Run the node first"):
        export.export(bundle, tmp_path / "model.onnx")
    start.run(bundle)
    np.savez(tmp_path / "x.npz", x=PIXELS[..., :5])
    with pytest.raises(DataError, match=r"expected \(1, 8, 8\)"):
        export.predict(bundle, tmp_path / "x.npz")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(StorageError, match=r"model\.safetensors' could not be written"):
        export.export(bundle, tmp_path / "model.safetensors")


def test_export_refuses_the_journal_of_a_running_node(tmp_path: Path) -> None:
    bundle = train(tmp_path / "plant")
    journal = Journal(bundle.folder / "state", bundle.owner)
    try:
        with pytest.raises(StorageError, match="is in use by another process"):
            export.export(bundle, tmp_path / "model.safetensors")
    finally:
        journal.close()


def test_export_refuses_the_journal_of_another_node_or_network(
    tmp_path: Path, examples: Path
) -> None:
    bundle, other = train(tmp_path / "plant"), create_bundle(tmp_path / "other")
    with pytest.raises(StorageError, match="belongs to another network"):
        export.predict(other, examples, bundle.folder / "state")
    provisioning.add(tmp_path / "plant", "new", ["node-0"])
    newcomer = open_bundle(tmp_path / "plant/nodes/new")
    with pytest.raises(StorageError, match=r"belongs to another node \(node-0, not new\)"):
        export.predict(newcomer, examples, bundle.folder / "state")


def test_predict_writes_scores_to_the_given_file(
    tmp_path: Path, examples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = train(tmp_path / "plant")
    words = ["node", "predict", "--bundle", str(bundle.folder), "--data", str(examples), "--out"]
    capsys.readouterr()
    assert execute([*words, str(tmp_path / "scores")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'scores'}\n"
    assert np.load(tmp_path / "scores")["y"].shape == (7, 10)
    assert execute([*words, str(tmp_path / "none" / "y.npz")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedspd: '{tmp_path}/none/y.npz' could not be written (")


def test_regression_of_several_targets_is_trained_exported_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two_numbers.py").write_text(
        "from torch import nn\n\n\ndef make(shape, classes):\n    return nn.Linear(3, 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    own = tmp_path / "own.npz"
    np.savez(own, x=x, y=x[:, :2])
    bundle = create_bundle(
        tmp_path / "plant",
        data={"name": str(own), "mixture": "iid"},
        model={"name": "two_numbers:make"},
    )
    start.run(bundle, data=str(own))
    export.export(bundle, tmp_path / "model.safetensors")
    np.savez(tmp_path / "x.npz", x=x[:5])
    capsys.readouterr()
    options = ["--bundle", str(bundle.folder), "--data", str(tmp_path / "x.npz")]
    assert execute(["node", "predict", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = [[float(word) for word in line.split()] for line in lines]
    np.testing.assert_allclose(printed, export.predict(bundle, tmp_path / "x.npz"), rtol=1e-5)


def test_export_prints_and_logs_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    bundle = train(tmp_path / "plant")
    capfd.readouterr()
    caplog.clear()
    export.export(bundle, tmp_path / "model.onnx")
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_private_node_says_what_its_model_contains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that has trained on beyond its budget has a model that is not covered."""
    caplog.set_level(logging.INFO, "fedspd.node")
    privacy = {"noise": 2.0, "delta": 0.1, "rate": 1.0}
    bundle = train(tmp_path / "plant", "fedavg", privacy=privacy)
    assert "privacy planned: mechanism=gaussian unit=example clip=1 noise=2 " in caplog.text
    assert "delta exceeded 1 / examples: delta=0.1 examples=40" in caplog.text
    to = tmp_path / "model.safetensors"
    assert "is covered by the budget" in str(export.export(bundle, to))
    assert execute(["privacy", str(bundle.folder)]) == 0
    assert "at delta = 0.1, against all neighbours" in " ".join(capsys.readouterr().out.split())
    folder = RunFolder(bundle.journal_folder(None))
    folder.write("privacy.json", {**folder.read("privacy.json"), "silent": True})
    assert "after its budget was spent" in str(export.export(bundle, to))
