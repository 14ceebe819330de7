"""A client's model as a file: it predicts as in Python, and says which inputs it takes."""

import json
import resource

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import fedspd
from fedspd.cli.main import execute
from fedspd.core.errors import StorageError
from fedspd.experiment.export import save_model

TINY = {
    "method": "fedavg",
    "clients": 3,
    "rounds": 1,
    "data": {"examples": 20},
    "topology": {"kind": "ring"},
    "training": {"epochs": 1},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedspd.run(TINY, out=tmp_path_factory.mktemp("runs") / "a")


def export(run, to, client=1):
    assert execute(["export", str(run.folder), "--client", str(client), "--to", str(to)]) == 0


def check_inputs(text):
    about = json.loads(text)["input"]
    assert about["shape"] == [1, 8, 8]
    assert about["dtype"] == "float32"
    assert "x / 127.5 - 1" in about["scaling"]


def test_safetensors_has_the_weights(run, tmp_path):
    export(run, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        check_inputs(file.metadata()["fedspd"])
        for name, tensor in run.model(1).state_dict().items():
            assert torch.equal(file.get_tensor(name), tensor)
    (tmp_path / "plain").touch()
    modes = {(tmp_path / name).stat().st_mode for name in ("plain", "m.safetensors")}
    assert len(modes) == 1  # others may read it where they may read other files


def test_pt2_predicts_as_the_client_does(run, tmp_path):
    export(run, tmp_path / "m.pt2")
    extra = {"fedspd": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    check_inputs(extra["fedspd"])
    x = run.experiment.plan.test.x[1]
    torch.testing.assert_close(program.module()(x), run.predict(1, x))


def test_file_has_the_scale_of_the_clients_own_inputs(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(30, 9, (90, 4)).astype(np.float32), np.arange(90) % 2
    np.savez(tmp_path / "own.npz", x=x, y=y, client=np.arange(90) // 30)
    data = {"name": str(tmp_path / "own.npz"), "scale": "standard"}
    scaled = fedspd.run({**TINY, "data": data}, out=tmp_path / "run")
    export(scaled, tmp_path / "m.pt2")
    extra = {"fedspd": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    scaling = json.loads(extra["fedspd"])["input"]["scaling"]
    assert scaling["formula"] == "(x - mean) / std"
    inputs = (torch.from_numpy(x) - torch.tensor(scaling["mean"])) / torch.tensor(scaling["std"])
    torch.testing.assert_close(program.module()(inputs), scaled.predict(1, x))


@pytest.mark.long
def test_onnx_predicts_as_the_client_does(run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    export(run, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    check_inputs(session.get_modelmeta().custom_metadata_map["fedspd"])
    x = run.experiment.plan.test.x[1]
    (y,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), run.predict(1, x), rtol=1e-4, atol=1e-5)


def test_export_refuses_what_it_cannot_write(run, tmp_path, capsys):
    folder = str(run.folder)
    assert execute(["export", folder, "--to", str(tmp_path / "m.xyz")]) == 2
    assert execute(["export", folder, "--to", str(tmp_path / "no" / "m.pt2")]) == 2
    assert execute(["export", folder, "--client", "9", "--to", str(tmp_path / "m.pt2")]) == 2
    errors = capsys.readouterr().err
    assert "expected a name that ends in .onnx or .pt2 or .safetensors" in errors
    assert "client = 9: expected an integer from 0 to 2." in errors


def test_export_that_finds_no_room_keeps_the_file_of_an_earlier_one(tmp_path):
    to = tmp_path / "model.safetensors"
    save_model(nn.Linear(4, 2), (4,), torch.float32, to)
    before, limits = to.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StorageError, match="could not be written"):
            save_model(nn.Linear(400, 2), (400,), torch.float32, to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert to.read_bytes() == before
    assert list(tmp_path.iterdir()) == [to]
