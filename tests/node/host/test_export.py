"""What a node has learned, for other programs. A network of one node needs no neighbours, and runs in this process."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from fedspd.cli.main import guarded
from fedspd.config import validate
from fedspd.core.errors import ConfigError, DataError, StorageError
from fedspd.data.federation import scale_inputs
from fedspd.node.host import export, local_network, provisioning, start
from fedspd.node.host.bundle import open_bundle
from fedspd.node.identity.manifest import Manifest
from fedspd.node.peer.journal import Journal
from fedspd.storage.run_folder import RunFolder

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 1, 8, 8), dtype=np.uint8)
ONE_MODEL = ("fedspd", "fedavg", "fedsoft", "ifca", "pfedme", "local")
SEVERAL = ("fedem",)


def bundle_of(folder: Path, method: str = "fedspd", **changes: Any) -> Path:
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
    return folder / "nodes" / "node-0"


def trained(folder: Path, method: str = "fedspd", **changes: Any) -> Path:
    bundle = bundle_of(folder, method, **changes)
    start.run(open_bundle(bundle))
    return bundle


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    np.savez(tmp_path / "x.npz", x=PIXELS)
    return tmp_path / "x.npz"


def onnx_scores(path: Path, x: torch.Tensor) -> np.ndarray[Any, Any]:
    (scores,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(
        ["y"], {"x": x.numpy()}
    )
    return np.asarray(scores)


@pytest.mark.parametrize("method", ONE_MODEL)
def test_onnx_says_what_predict_says_for_any_number_of_examples(
    method: str, tmp_path: Path, examples: Path
) -> None:
    bundle = trained(tmp_path / "plant", method)
    export.export(open_bundle(bundle), tmp_path / "model.onnx")
    expected = export.predict(open_bundle(bundle), examples).numpy()
    assert expected.shape == (7, 10)
    x = scale_inputs(PIXELS)
    for count in (1, 2, 7):
        np.testing.assert_allclose(
            onnx_scores(tmp_path / "model.onnx", x[:count]), expected[:count], atol=1e-5
        )


@pytest.mark.parametrize("name", ["cnn", pytest.param("mobilenet-v2", marks=pytest.mark.long)])
def test_onnx_of_a_model_for_images(name: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (12, 1, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x=pixels, y=np.arange(12) % 3)
    np.savez(tmp_path / "x.npz", x=pixels)
    data = {"name": str(tmp_path / "own.npz"), "mixture": "iid", "examples": 8}
    bundle = trained(
        tmp_path / "plant", rounds=1, data=data, model={"name": name}, fedspd={"final_epochs": 1}
    )
    export.export(open_bundle(bundle), tmp_path / "model.onnx")
    expected = export.predict(open_bundle(bundle), tmp_path / "x.npz").numpy()
    np.testing.assert_allclose(
        onnx_scores(tmp_path / "model.onnx", scale_inputs(pixels)), expected, atol=1e-4
    )


def test_safetensors_are_the_weights_by_name(tmp_path: Path, examples: Path) -> None:
    bundle = trained(tmp_path / "plant", dtype="float64")
    export.export(open_bundle(bundle), tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    module = export.personal_model(export.load_runner(open_bundle(bundle)))
    assert weights.keys() == module.state_dict().keys()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float64}
    module.load_state_dict(weights)
    expected = export.predict(open_bundle(bundle), examples)
    torch.testing.assert_close(module(scale_inputs(PIXELS).double()).detach(), expected)


@pytest.mark.parametrize("method", SEVERAL)
def test_a_method_of_several_models_predicts_but_exports_none(
    method: str, tmp_path: Path, examples: Path
) -> None:
    bundle = trained(tmp_path / "plant", method)
    assert export.predict(open_bundle(bundle), examples).shape == (7, 10)
    with pytest.raises(
        ConfigError,
        match=r"FedEM has no single model to export: .* use 'fedspd node predict'",
    ):
        export.export(open_bundle(bundle), tmp_path / "model.onnx")


def test_before_the_last_round_there_are_answers_but_no_model_of_its_own(
    tmp_path: Path, examples: Path
) -> None:
    bundle = trained(tmp_path / "plant")
    record = RunFolder(bundle / "state")
    runner = export.load_runner(open_bundle(bundle))
    runner.begin()
    with record.checkpoint(9, {"round": 9}) as folder:
        runner.save(folder)
    assert export.predict(open_bundle(bundle), examples).shape == (7, 10)
    with pytest.raises(ConfigError, match=r"FedSPD has no single model to export: .* Let the node"):
        export.export(open_bundle(bundle), tmp_path / "model.onnx")


@pytest.mark.parametrize("command", [["export", "--to", "model.onnx"], ["status"], ["run"]])
def test_command_refuses_a_journal_of_another_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    bundle = bundle_of(tmp_path / "plant")
    folder = RunFolder.create(bundle / "state")
    folder.begin({"format": 2, "versions": {"fedspd": "0.9.5"}})
    folder.unlock()
    assert guarded(["node", *command, "--bundle", str(bundle)]) == 2
    assert "format = 2, written by fedspd 0.9.5; expected 1. Install" in capsys.readouterr().err


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "plant")
    with pytest.raises(
        ConfigError, match=r"--to model.pt: expected a name that ends in .onnx or .safetensors"
    ):
        export.export(open_bundle(bundle), Path("model.pt"))
    with pytest.raises(ConfigError, match="there is no folder"):
        export.export(open_bundle(bundle), tmp_path / "none" / "model.onnx")
    with pytest.raises(StorageError, match=r"no journal of a node; .* Run the node first"):
        export.export(open_bundle(bundle), tmp_path / "model.onnx")
    start.run(open_bundle(bundle))
    np.savez(tmp_path / "x.npz", x=PIXELS[..., :5])
    with pytest.raises(DataError, match=r"expected \(1, 8, 8\)"):
        export.predict(open_bundle(bundle), tmp_path / "x.npz")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(StorageError, match=r"model\.safetensors' could not be written"):
        export.export(open_bundle(bundle), tmp_path / "model.safetensors")


def test_a_node_that_runs_is_not_read_in_the_middle_of_a_round(tmp_path: Path) -> None:
    bundle = trained(tmp_path / "plant")
    manifest = Manifest.load(bundle / "manifest.json")
    journal = Journal(
        bundle / "state",
        {"network": manifest.network, "node": "node-0", "agreement": manifest.agreement},
    )
    try:
        with pytest.raises(
            StorageError, match="is in use by another process: wait for it, or stop it"
        ):
            export.export(open_bundle(bundle), tmp_path / "model.safetensors")
    finally:
        journal.close()


def test_the_rounds_of_another_node_or_network_are_not_taken_for_its_own(
    tmp_path: Path, examples: Path
) -> None:
    bundle, other = trained(tmp_path / "plant"), bundle_of(tmp_path / "other")
    with pytest.raises(StorageError, match="belongs to another network"):
        export.predict(open_bundle(other), examples, bundle / "state")
    added = provisioning.add(tmp_path / "plant", "new", ["node-0"])
    with pytest.raises(StorageError, match=r"belongs to another node \(node-0, not new\)"):
        export.export(
            open_bundle(tmp_path / "plant/nodes" / added.name),
            tmp_path / "model.safetensors",
            bundle / "state",
        )


def test_scores_are_written_where_the_command_says(
    tmp_path: Path, examples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = trained(tmp_path / "plant")
    words = ["node", "predict", "--bundle", str(bundle), "--data", str(examples), "--out"]
    capsys.readouterr()
    assert guarded([*words, str(tmp_path / "scores")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'scores'}\n"
    assert np.load(tmp_path / "scores")["y"].shape == (7, 10)
    assert guarded([*words, str(tmp_path / "none" / "y.npz")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedspd: '{tmp_path}/none/y.npz' could not be written (")


def test_a_regression_of_several_numbers_is_trained_exported_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two_numbers.py").write_text(
        "from torch import nn\n\n\ndef make(shape, classes):\n    return nn.Linear(3, 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    own = tmp_path / "own.npz"
    np.savez(own, x=x, y=x[:, :2])
    bundle = bundle_of(
        tmp_path / "plant",
        data={"name": str(own), "mixture": "iid"},
        model={"name": "two_numbers:make"},
    )
    start.run(open_bundle(bundle), data=str(own))
    export.export(open_bundle(bundle), tmp_path / "model.safetensors")
    np.savez(tmp_path / "x.npz", x=x[:5])
    capsys.readouterr()
    assert (
        guarded(["node", "predict", "--bundle", str(bundle), "--data", str(tmp_path / "x.npz")])
        == 0
    )
    said = [[float(word) for word in line.split()] for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(
        said, export.predict(open_bundle(bundle), tmp_path / "x.npz"), rtol=1e-5
    )


def test_nothing_is_said_while_a_model_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    bundle = trained(tmp_path / "plant")
    capfd.readouterr()
    caplog.clear()
    export.export(open_bundle(bundle), tmp_path / "model.onnx")
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
