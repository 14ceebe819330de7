"""FedSPD-Split in complete runs: on graphs that change, with other models, and as files."""

import numpy as np
import pytest
import torch
from torch import nn

import fedspd
from fedspd.cli.main import execute

WORLD = {"mixture": "permutation", "shares": "pure", "examples": 60, "test_examples": 10}
QUICK = {
    "clients": 8,
    "rounds": 5,
    "data": WORLD,
    "training": {"lr": 0.2, "batch": 10, "epochs": 2},
    "fedspd-split": {"final_epochs": 1},
}


def two_groups(found) -> bool:
    """Return whether the clients have two clusters, and each population has one of its own."""
    truth = np.array([of[0] for of in found.experiment.plan.truth])
    largest = found.mixture.argmax(1)
    return found.summary["clusters"] == 2 and len(set(zip(truth, largest, strict=True))) == 2


@pytest.mark.parametrize("topology", [{"degree": 4, "remove": 0.2}, {"kind": "star"}])
def test_split_finds_populations_on_graphs_that_change_and_with_a_server(topology):
    config = QUICK | {"topology": topology}
    one, two = (fedspd.run(config, workers=workers) for workers in (1, 2))
    assert two_groups(one)
    assert one.summary["hash"] == two.summary["hash"]
    assert one.summary["bytes"] == two.summary["bytes"]


def colours(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return colour images of 8 x 8 pixels whose brightest quarter tells their class."""
    rng = np.random.default_rng(0)
    y = np.arange(n) % 4
    x = rng.integers(0, 100, (n, 3, 8, 8), dtype=np.uint8)
    for image, label in zip(x, y, strict=True):
        rows, columns = (slice(4 * (i % 2), 4 * (i % 2) + 4) for i in (label // 2, label))
        image[:, rows, columns] += 100
    return x, y


def with_a_projection(shape, classes):
    """A model whose last linear layer is not its head."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 16), nn.ReLU())
            self.answer = nn.Linear(16, classes)
            self.unused = nn.Linear(2, 2)

        def forward(self, x):
            return self.answer(self.body(x))

    return Net()


SIX = QUICK | {"topology": {"kind": "complete"}, "clients": 6}


def test_split_finds_populations_with_a_head_that_the_config_names():
    config = SIX | {"model": {"head": "answer"}}
    data = (*colours(400), *colours(80))
    found = fedspd.run(config, data=data, model=with_a_projection)
    assert two_groups(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "examples", "finds"),
    # the features of a deep model before training need many examples
    [({"name": "cifar-cnn", "small": True}, 200, True), ({"name": "mobilenet-v2"}, 20, False)],
)
def test_split_trains_deep_models_with_batchnorm(model, examples, finds):
    training = {"lr": 0.1, "batch": 10, "epochs": 1}
    options = {"clusters": 2, "model": model, "training": training}
    config = SIX | options | {"data": WORLD | {"examples": examples}}
    found = fedspd.run(config, data=(*colours(6 * examples + 60), *colours(80)))
    assert found.summary["clusters"] == 2
    assert np.isfinite(found.summary["clients"]["test_loss"]).all()
    assert np.allclose(found.mixture.sum(1), 1)
    assert two_groups(found) or not finds
    assert found.accuracy.mean() > 0.9 or not finds


def test_exported_mixture_of_heads_predicts_as_the_client_does(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    found = fedspd.run(SIX, out=tmp_path / "run")
    assert two_groups(found)
    path, x = tmp_path / "m.onnx", found.experiment.plan.test.x[1]
    assert execute(["export", str(found.folder), "--client", "1", "--to", str(path)]) == 0
    for count in (1, 7):
        (y,) = onnxruntime.InferenceSession(path).run(None, {"x": x[:count].numpy()})
        expected = found.predict(1, x[:count])
        torch.testing.assert_close(torch.from_numpy(y), expected, rtol=1e-4, atol=1e-5)


def test_split_of_a_regression_finds_two_functions():
    """y = w . x for five clients, and y = -w . x for three."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 80, 4)).astype(np.float32)
    sign_N = np.array([1, -1, 1, -1, 1, -1, 1, 1], np.float32)
    y = x @ np.array([1.0, -2.0, 0.5, 1.0], np.float32) * sign_N[:, None]
    parts = {f"site-{i}": (x[i], y[i]) for i in range(8)}
    options = {"data": {}, "model": {"name": "mlp"}, "topology": {"kind": "complete"}, "rounds": 12}
    found = fedspd.run(QUICK | options | {"clients": 8}, data=parts)
    assert found.summary["clusters"] == 2
    largest = found.mixture.argmax(1)
    assert len(set(zip(sign_N, largest, strict=True))) == 2
