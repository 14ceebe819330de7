"""fedspd.run, as in a notebook: its arguments, its result, and what it leaves alone."""

import gc
import os
import shutil
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fedspd
from fedspd.algorithms import METHODS
from fedspd.config import load, validate
from fedspd.core.errors import ConfigError, DataError, StorageError

TINY = {
    "method": "fedspd",
    "clients": 4,
    "rounds": 2,
    "data": {"examples": 24},
    "topology": {"degree": 2},
    "training": {"epochs": 1, "batch": 8},
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return fedspd.run(TINY, out=tmp_path_factory.mktemp("runs") / "a")


# ---- arguments


def test_run_accepts_a_dict_a_path_and_a_config(result):
    path = result.folder / "config.toml"
    for config in (path, str(path), load(path)):
        assert fedspd.run(config).summary["hash"] == result.summary["hash"]


@pytest.mark.parametrize("config", [3, ["rounds=3"], object()])
def test_run_refuses_a_config_of_another_type(config):
    sentence = r"config: a value of type .*; expected a dict, the path of a TOML file or an Exp"
    with pytest.raises(ConfigError, match=sentence):
        fedspd.run(config)


def test_run_learns_from_the_users_arrays_and_model():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    result = fedspd.run(
        TINY | {"rounds": 5, "data": {"mixture": "iid"}, "training": {"lr": 0.5}},
        data=(x, y),
        model=lambda shape, classes: nn.Linear(shape[0], classes),
    )
    assert result.accuracy.mean() > 0.8


def test_run_of_a_regression_has_losses_and_no_accuracy():
    x = np.random.default_rng(0).normal(size=(200, 3))
    y = x @ np.array([1.0, -2.0, 0.5])
    config = TINY | {
        "rounds": 10,
        "clusters": 1,
        "dtype": "float64",
        "data": {"mixture": "iid"},
        "model": {"name": "linear"},
    }
    result = fedspd.run(config, data=(x, y))
    assert result.summary["accuracy"]["mean"] is None
    assert max(result.summary["clients"]["test_loss"]) < 0.05  # of targets whose variance is 5.25


def test_run_refuses_a_model_that_does_not_fit_before_it_writes(tmp_path):
    def narrow(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    sentence = r"^model: its output for 2 examples has shape \(2, 3\); expected \(2, 10\)"
    with pytest.raises(ConfigError, match=sentence):
        fedspd.run(TINY, model=narrow, out=tmp_path / "a")
    sentence = r"it does not work on examples of shape .*ZeroDivisionError"
    with pytest.raises(ConfigError, match=sentence):
        fedspd.run(TINY, model=lambda shape, classes: 1 / 0, out=tmp_path / "a")
    with pytest.raises(ConfigError, match=r"^model: a value of type int; expected a function"):
        fedspd.run(TINY, model=3, out=tmp_path / "a")
    with pytest.raises(ConfigError, match=r"^model: a value of type Linear; expected a function"):
        fedspd.run(TINY, model=nn.Linear(64, 10), out=tmp_path / "a")
    sentence = (
        r"^model: OfClasses cannot be called with a shape and a number of classes \(too many .*\); "
        r"expected a function .*\. Pass lambda shape, classes: OfClasses\(\.\.\.\)\.$"
    )
    with pytest.raises(ConfigError, match=sentence):
        fedspd.run(TINY, model=OfClasses, out=tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


class OfClasses(nn.Linear):
    def __init__(self, classes=10):
        super().__init__(64, classes)


def with_two_linear_layers(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))


def with_a_convolution_alone(shape, classes):
    return nn.Sequential(nn.Conv2d(1, classes, 8), nn.Flatten())


def test_run_refuses_a_head_that_does_not_exist_before_it_writes(tmp_path):
    unknown = r"^model\.head = '2': not a linear layer of the model; expected one of: 1, 3\."
    with pytest.raises(ConfigError, match=unknown):
        fedspd.run(
            TINY | {"model": {"head": "2"}}, model=with_two_linear_layers, out=tmp_path / "a"
        )
    without = r"^model\.head: the model has no linear layer; expected one as its head\."
    training = TINY["training"] | {"head_rate": 2.0}
    methods = [{"method": name} for name in ("facade", "fedrep", "fedspd-split")]
    for needy in (*methods, {"method": "fedavg", "training": training}):
        with pytest.raises(ConfigError, match=without):
            fedspd.run(TINY | needy, model=with_a_convolution_alone, out=tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_run_without_a_head_takes_any_model():
    result = fedspd.run(TINY | {"method": "fedavg"}, model=with_a_convolution_alone)
    assert result.summary["models_sent"] > 0


def test_head_of_the_config_is_the_one_that_stays_at_home():
    sizes = []
    for head in (None, "1"):
        config = TINY | {"method": "fedper", "model": {"head": head}}
        result = fedspd.run(config, model=with_two_linear_layers)
        sizes.append(result.events()[0]["traffic"][0]["model_bytes"])
    assert sizes == [4 * (64 * 8 + 8), 4 * (8 * 10 + 10)]


def test_resume_needs_a_folder_and_the_same_config_or_none(result):
    with pytest.raises(ConfigError, match="resume = True: expected the folder of the run as out"):
        fedspd.run(TINY, resume=True)
    assert fedspd.run(TINY, out=result.folder, resume=True).summary == result.summary
    with pytest.raises(StorageError, match="with another config: seed = 0, now 1"):
        fedspd.run(TINY | {"rounds": 3, "seed": 1}, out=result.folder, resume=True)


def test_resume_refuses_other_data(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(100, 5)), np.arange(100) % 2
    config = TINY | {"data": {"mixture": "iid"}}
    fedspd.run(config, data=(x, y), out=tmp_path / "a")
    with pytest.raises(StorageError, match="was started with another data"):
        fedspd.run(data=(x + 1, y), out=tmp_path / "a", resume=True)


# ---- the result


def accuracy(output, y):
    return float((output.argmax(1) == y).double().mean())


@pytest.mark.parametrize("method", METHODS)
def test_result_has_models_that_score_as_recorded(method):
    result = fedspd.run(TINY | {"method": method})
    test = result.experiment.plan.test
    for client in range(4):
        x, y, recorded = test.x[client], test.y[client], result.accuracy[client]
        assert accuracy(result.predict(client, x), y) == pytest.approx(recorded)
        if method != "fedem":  # which mixes the outputs of several models
            module = result.model(client)
            assert isinstance(module, nn.Module)
            assert not module.training
            with torch.no_grad():
                assert accuracy(module(x), y) == pytest.approx(recorded)


def test_result_of_fedem_has_no_single_model():
    sentence = r"method = 'fedem': it does not end in one model per client\. Use Result\.predict"
    with pytest.raises(ConfigError, match=sentence):
        fedspd.run(TINY | {"method": "fedem"}).model(0)


def test_result_model_keeps_its_type_and_its_batchnorm_statistics():
    def factory(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))

    result = fedspd.run(TINY | {"dtype": "float64"}, model=factory)
    module = result.model(1)
    assert module[2].weight.dtype == torch.float64
    assert int(module[1].num_batches_tracked) > 0
    x = result.experiment.plan.test.x[1].double()
    with torch.no_grad():
        assert torch.allclose(module(x), result.predict(1, x), rtol=0, atol=1e-12)


def test_result_refuses_a_client_that_does_not_exist(result):
    with pytest.raises(ConfigError, match="client = 4: expected an integer from 0 to 3"):
        result.model(4)


def test_result_without_out_removes_its_folder_at_its_end():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        result = fedspd.run(TINY | {"rounds": 1})
        folder = result.folder
        assert (folder / "result.json").exists()
        del result
        gc.collect()
    assert not folder.exists()


# ---- what a run leaves alone


def test_run_leaves_global_randomness_and_threads_alone(result):
    torch.manual_seed(5)
    np.random.seed(5)
    torch.set_num_threads(2)
    try:
        before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
        fedspd.run(TINY, workers=1)
        fedspd.run(TINY, workers=2)
        result.model(0)
        result.predict(0, result.experiment.plan.test.x[0])
        assert torch.equal(torch.random.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("workers", [1, 2])
def test_run_works_inside_a_thread(result, workers):
    found = []

    def train():
        found.append(fedspd.run(TINY, workers=workers).summary["hash"])

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [result.summary["hash"]]


def test_run_refuses_a_model_function_that_returns_no_module():
    for found, kind in ((None, "NoneType"), (nn.Linear, "type")):
        with pytest.raises(ConfigError, match=rf"^model: the function returned .* {kind};"):
            fedspd.run(TINY, model=lambda shape, classes, found=found: found)


@pytest.mark.parametrize("frozen", [nn.Flatten(), nn.Linear(4, 3).requires_grad_(False)])
def test_run_refuses_a_model_with_nothing_to_train(frozen):
    x, y = np.zeros((40, 4), np.float32), np.arange(40) % 3
    name = type(frozen).__name__
    with pytest.raises(ConfigError, match=f"^model: {name} has no parameters to train; expected"):
        fedspd.run({"clients": 2, "rounds": 1}, data=(x, y), model=lambda shape, classes: frozen)


@pytest.fixture
def locked(tmp_path):
    """Return a folder that this user may not read, be it the superuser or not."""
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "a.npz").touch()
    folder.chmod(0)
    _ = fedspd.compare, fedspd.open, fedspd.report  # another user may not import them
    is_superuser = os.geteuid() == 0
    if is_superuser:
        os.seteuid(65534)
    yield folder
    if is_superuser:
        os.seteuid(0)
    folder.chmod(0o700)


def test_folder_that_may_not_be_read_is_refused_in_a_sentence(locked):
    for use in (
        lambda: fedspd.run(TINY, out=locked / "run"),
        lambda: fedspd.compare(TINY, out=locked / "comparison", methods=["local"], seeds=1),
        lambda: fedspd.open(locked),
        lambda: fedspd.report(locked),
    ):
        with pytest.raises(StorageError, match=r"cannot be read \(Permission denied\)"):
            use()
    with pytest.raises(DataError, match=r"^data\.name = '.*locked': .* cannot be read: Permission"):
        fedspd.run({**TINY, "data": {"name": str(locked)}})


def test_run_refuses_a_folder_that_is_not_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for function in (fedspd.run, fedspd.compare):
        with pytest.raises(ConfigError, match=r"^out: a value of type int; expected the path"):
            function({"clients": 2, "rounds": 1}, out=3)
    assert not list(tmp_path.iterdir())


def test_result_of_a_method_without_clusters_has_an_empty_mixture():
    assert fedspd.run(TINY | {"method": "local", "rounds": 1}).mixture.shape == (4, 0)


def test_run_accepts_a_closure_as_model_with_two_workers():
    width = 7

    def factory(shape, classes):
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes)
        )

    one, two = (fedspd.run(TINY, model=factory, workers=count) for count in (1, 2))
    assert one.summary["hash"] == two.summary["hash"]


SCRIPT = """
import fedspd
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)
    def forward(self, x):
        return self.layer(x.flatten(1))

config = {"clients": 4, "rounds": 1, "data": {"examples": 20}, "topology": {"degree": 2}}
config["method"] = "fedspd"

def factory(shape, classes):
    return Net(classes)

results = [fedspd.run(config, model=factory, workers=workers) for workers in (1, 2)]
assert results[0].summary["hash"] == results[1].summary["hash"]
print(type(results[1].model(0)).__name__)
"""


def test_run_works_in_a_script_without_a_main_guard(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("Net\n", "")


def test_result_is_shown_in_one_line(tmp_path):
    assert repr(fedspd.run(TINY, out=tmp_path / "a")) == f"Result(folder={tmp_path / 'a'!r})"


# ---- data and model from Python


ARRAYS = np.random.default_rng(0).normal(size=(80, 5)), np.arange(80) % 3
OWN = {"method": "fedavg", "clients": 3, "rounds": 2, "data": {"mixture": "iid"}}


def net(shape, classes):
    return nn.Sequential(nn.Linear(*shape, 7), nn.ReLU(), nn.Linear(7, classes))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "own"
    return fedspd.run(OWN, data=ARRAYS, model=net, out=folder)


def test_config_names_data_and_model_that_came_from_python(own):
    config = load(own.folder / "config.toml")
    digest = own.experiment.federation.description["sources"][0]["sha256"]
    assert config.data.name == f"from Python: custom, shape 5, sha256 {digest[:16]}"
    assert config.model.name.startswith("from Python: Sequential, 66 parameters, sha256 ")


def test_config_does_not_repeat_a_run_without_its_data_and_model(own):
    path = own.folder / "config.toml"
    with pytest.raises(DataError, match=r"^data.name = 'from Python: .*Pass them again, as fedspd"):
        fedspd.run(path)
    with pytest.raises(ConfigError, match=r"^model.name = 'from Python: .*Pass it again, as fedsp"):
        fedspd.run(path, data=ARRAYS)
    again = fedspd.run(path, data=ARRAYS, model=net)
    assert again.summary["hash"] == own.summary["hash"]


def test_resume_needs_the_data_and_the_model_again(own):
    for given in (OWN, None):
        resumed = fedspd.run(given, data=ARRAYS, model=net, out=own.folder, resume=True)
        assert resumed.summary == own.summary
    with pytest.raises(DataError, match="Pass them again"):
        fedspd.run(out=own.folder, resume=True, model=net)
    with pytest.raises(ConfigError, match="Pass it again"):
        fedspd.run(out=own.folder, resume=True, data=ARRAYS)
    with pytest.raises(StorageError, match="started with another data "):
        fedspd.run(out=own.folder, resume=True, data=(ARRAYS[0] + 1, ARRAYS[1]), model=net)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, lambda x: x.tolist()])
def test_predict_takes_arrays_tensors_and_lists(own, kind):
    scores = own.predict(np.int64(1), kind(ARRAYS[0][:4]))
    expected = own.model(1)(torch.from_numpy(ARRAYS[0][:4]).float())
    assert torch.allclose(scores, expected.detach(), atol=1e-6)


@pytest.mark.parametrize("x", [ARRAYS[0][:, :4], ARRAYS[0][0], [["a"] * 5], [[1.0], [2.0, 3.0]]])
def test_predict_refuses_examples_of_another_shape(own, x):
    with pytest.raises(DataError, match=r"^x: .*; expected "):
        own.predict(0, x)


def test_predict_scales_images_as_training_did(result):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 1, 8, 8)).astype(np.uint8)
    scaled = torch.from_numpy(pixels / 127.5 - 1).float()
    assert torch.allclose(result.predict(0, pixels), result.predict(0, scaled), atol=1e-5)


@pytest.mark.parametrize("callbacks", [[3], 3, [fedspd.Callback]])
def test_run_refuses_callbacks_that_are_none(callbacks, tmp_path):
    with pytest.raises(ConfigError, match=r"^callbacks: a value of type .*; expected a list of"):
        fedspd.run(OWN, data=ARRAYS, callbacks=callbacks, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"clients": 5_000_000}, "^clients . holdout_clients = 5000000: 'digits' has only 1442"),
        ({"options": {"mu": 1}}, "^options.mu = 1: an option of a method given as module:Class"),
        (
            {"method": "fedavg", "fedspd": {"warmup": 3}},
            "^fedspd.warmup = 3: an option of 'fedspd' only, and method = 'fedavg'. Leave it out",
        ),
        ({"data": {"name": " "}}, "^data.name = ' ': empty; expected one of: cifar10"),
        (
            {"method": "fedsoft", "fedsoft": {"select": 9}, "topology": {"kind": "star"}},
            "^fedsoft.select = 9: clients = 4; expected at most 4.$",
        ),
        (
            {"method": "fedsoft", "fedsoft": {"select": 2}},
            "^fedsoft.select = 2: there is no server to select clients",
        ),
        (
            {"model": {"hidden": 2**62}},
            "^model.name = 'mlp': its parameters do not fit",
        ),
    ],
)
def test_run_refuses_what_it_could_not_do(settings, sentence):
    for config in (TINY | settings, validate(TINY | settings)):
        with pytest.raises(fedspd.FedspdError, match=sentence):
            fedspd.run(config)


def test_resume_refuses_the_checkpoint_of_another_run(own, tmp_path):
    fedspd.run(OWN | {"clients": 2}, data=ARRAYS, model=net, out=tmp_path / "b")
    shutil.copytree(own.folder, tmp_path / "own")
    shutil.rmtree(tmp_path / "own" / "checkpoints")
    shutil.copytree(tmp_path / "b" / "checkpoints", tmp_path / "own" / "checkpoints")
    with pytest.raises(StorageError, match=r"round-000003': the checkpoint of another run. Resto"):
        fedspd.run(out=tmp_path / "own", data=ARRAYS, model=net, resume=True)


def test_resume_refuses_a_run_json_without_hashes(own, tmp_path):
    shutil.copytree(own.folder, tmp_path / "a")
    for content, sentence in (("{}", "format = null"), ('{"format": 1}', "it has no 'config'")):
        (tmp_path / "a" / "run.json").write_text(content)
        with pytest.raises(StorageError, match=sentence):
            fedspd.run(out=tmp_path / "a", data=ARRAYS, model=net, resume=True)


def test_resume_and_open_refuse_a_result_without_its_fields(own, tmp_path):
    shutil.copytree(own.folder, tmp_path / "a")
    (tmp_path / "a" / "result.json").write_text("{}")
    sentence = r"result.json' is damaged: it has no 'method'"
    with pytest.raises(StorageError, match=sentence):
        fedspd.run(out=tmp_path / "a", data=ARRAYS, model=net, resume=True)
    with pytest.raises(StorageError, match=sentence):
        fedspd.open(tmp_path / "a", data=ARRAYS, model=net)


def test_open_refuses_lost_events_and_result_lost_checkpoints(own, tmp_path):
    shutil.copytree(own.folder, tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    result = fedspd.open(tmp_path / "a", data=ARRAYS, model=net)
    with pytest.raises(StorageError, match=r"a': no checkpoint, so the clients' models are lost"):
        result.model(0)
    (tmp_path / "a" / "events.jsonl").write_text("")
    with pytest.raises(StorageError, match=r"events.jsonl' is damaged: 0 of 2 rounds and not the"):
        fedspd.open(tmp_path / "a", data=ARRAYS, model=net)


def test_resume_refuses_a_checkpoint_without_its_fields(own, tmp_path):
    shutil.copytree(own.folder, tmp_path / "a")
    for path in (tmp_path / "a" / "checkpoints").glob("*/checkpoint.json"):
        path.write_text("{}")
    with pytest.raises(StorageError, match=r"checkpoint.json.: format = null"):
        fedspd.run(out=tmp_path / "a", data=ARRAYS, model=net, resume=True)
