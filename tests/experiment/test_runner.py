"""fedspd.run as a person in a notebook uses it: what goes in, what comes out, and what stays as it was."""

import gc
import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedspd
from fedspd.algorithms import METHODS
from fedspd.config import load
from fedspd.core.errors import ConfigError, StorageError
from fedspd.experiment.events import alarms
from fedspd.runtime.measures import Measures

TINY = {
    "clients": 4,
    "rounds": 2,
    "data": {"examples": 24},
    "topology": {"degree": 2},
    "training": {"epochs": 1, "batch": 8},
    "fedspd": {"final_epochs": 1},
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return fedspd.run(TINY, out=tmp_path_factory.mktemp("runs") / "a")


# ---- what goes in


def test_a_dict_a_path_and_a_config_say_the_same(result, tmp_path):
    path = result.folder / "config.toml"
    for config in (path, str(path), load(path)):
        assert fedspd.run(config).summary["hash"] == result.summary["hash"]


@pytest.mark.parametrize("config", [3, ["rounds=3"], object()])
def test_something_else_is_refused(config):
    sentence = r"config: a value of type .*; expected a dict, the path of a TOML file or an Exp"
    with pytest.raises(ConfigError, match=sentence):
        fedspd.run(config)


def test_arrays_and_a_factory_of_the_users_own():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    result = fedspd.run(
        TINY | {"rounds": 5, "data": {"mixture": "iid"}, "training": {"lr": 0.5}},
        data=(x, y),
        model=lambda shape, classes: nn.Linear(shape[0], classes),
    )
    assert result.accuracy.mean() > 0.8


def test_a_regression_has_losses_and_no_accuracy():
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


def test_a_factory_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"the given model': its output for 2 examples has shape \(2, 3\); expected \(2, 10\)",
    ):
        fedspd.run(
            TINY,
            model=lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
            out=tmp_path / "a",
        )
    with pytest.raises(
        ConfigError, match=r"it does not work on examples of shape .*ZeroDivisionError"
    ):
        fedspd.run(TINY, model=lambda shape, classes: 1 / 0, out=tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_resume_needs_a_folder_and_the_same_config_or_none(result):
    with pytest.raises(ConfigError, match="resume = True: expected the folder of the run as out"):
        fedspd.run(TINY, resume=True)
    assert fedspd.run(TINY, out=result.folder, resume=True).summary == result.summary
    with pytest.raises(StorageError, match="the run was started with another config"):
        fedspd.run(TINY | {"rounds": 3}, out=result.folder, resume=True)


def test_other_data_than_those_of_the_checkpoint(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(100, 5)), np.arange(100) % 2
    config = TINY | {"data": {"mixture": "iid"}}
    fedspd.run(config, data=(x, y), out=tmp_path / "a")
    with pytest.raises(StorageError, match="was started with another data"):
        fedspd.run(data=(x + 1, y), out=tmp_path / "a", resume=True)


# ---- what comes out


def accuracy(output, y):
    return float((output.argmax(1) == y).double().mean())


@pytest.mark.parametrize("method", METHODS)
def test_every_client_predicts_as_well_as_was_recorded(method):
    result = fedspd.run(TINY | {"method": method})
    test = result.experiment.plan.test
    for client in range(4):
        assert accuracy(result.predict(client, test.x[client]), test.y[client]) == pytest.approx(
            result.accuracy[client]
        )


@pytest.mark.parametrize("method", ["fedspd", "fedavg", "ifca", "pfedme", "local"])
def test_every_client_gets_a_model_that_scores_what_was_recorded(method):
    result = fedspd.run(TINY | {"method": method})
    test = result.experiment.plan.test
    for client in range(4):
        module = result.model(client)
        assert isinstance(module, nn.Module)
        assert not module.training
        with torch.no_grad():
            assert accuracy(module(test.x[client]), test.y[client]) == pytest.approx(
                result.accuracy[client]
            )


def test_a_method_that_blends_predictions_has_no_single_model():
    with pytest.raises(
        ConfigError,
        match=r"method = 'fedem': it does not end in one model per client\. Use Result\.predict",
    ):
        fedspd.run(TINY | {"method": "fedem"}).model(0)


def test_a_model_keeps_its_type_and_its_batchnorm_statistics():
    def factory(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))

    result = fedspd.run(TINY | {"dtype": "float64"}, model=factory)
    module = result.model(1)
    assert module[2].weight.dtype == torch.float64
    assert int(module[1].num_batches_tracked) > 0
    x = result.experiment.plan.test.x[1].double()
    with torch.no_grad():
        assert torch.allclose(module(x), result.predict(1, x), rtol=0, atol=1e-12)


def test_a_client_that_is_not_there(result):
    with pytest.raises(ConfigError, match="client = 4: expected 0 to 3"):
        result.model(4)


def test_without_out_the_records_live_as_long_as_the_result():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        result = fedspd.run(TINY | {"rounds": 1})
        folder = result.folder
        assert (folder / "result.json").exists()
        del result
        gc.collect()
    assert not folder.exists()


def test_events_say_everything(result):
    first, second, final = result.events()
    assert [event["event"] for event in (first, second, final)] == ["round", "round", "final"]
    for event in (first, second):
        assert len(event["accuracy"]) == len(event["loss"]) == len(event["test_loss"]) == 4
        assert np.allclose(np.array(event["mixture"]).sum(1), 1)
        assert 0.5 <= event["purity"] <= 1
        assert len(event["consensus"]) == 2
        assert all(distance >= 0 for distance in event["consensus"])
        assert np.sum(event["table"]) == 4 * 24
        assert {"train", "losses", "total"} <= set(event["seconds"])
        assert event["alarms"] == []
        (traffic,) = event["traffic"]
        edges = {
            tuple(edge)
            for edge in json.loads((result.folder / "topology.json").read_text())["list"]
        }
        for sender, receiver, cluster in traffic["models"]:
            assert (min(sender, receiver), max(sender, receiver)) in edges
            assert cluster in (0, 1)
        sent = (
            len(traffic["models"]) * traffic["model_bytes"]
            + traffic["announcements"] * traffic["announcement_bytes"]
        )
        assert event["bytes"]["point_to_point"] == sent
        assert traffic["model_bytes"] == 4 * result.experiment.plan.learner.size
    assert final["traffic"] == []
    assert result.summary["models_sent"] == len(first["traffic"][0]["models"]) + len(
        second["traffic"][0]["models"]
    )


def test_where_the_graph_changes_every_round_says_which_edges_it_had():
    result = fedspd.run(
        TINY
        | {
            "clients": 6,
            "method": "fedavg",
            "topology": {"kind": "ring", "remove": 0.5},
            "rounds": 4,
        }
    )
    rounds = [event for event in result.events() if event["event"] == "round"]
    assert rounds[0]["edges"] == json.loads((result.folder / "topology.json").read_text())["list"]
    assert len({str(event["edges"]) for event in rounds}) > 1
    for event in rounds:
        (traffic,) = event["traffic"]
        both_ways = {(i, j) for i, j in event["edges"]} | {(j, i) for i, j in event["edges"]}
        assert {(sender, receiver) for sender, receiver, _ in traffic["models"]} == both_ways
        assert traffic["announcements"] == len(both_ways)


def test_the_shares_that_fedsofts_server_asks_for_are_no_models():
    """Each of two clients is picked for both clusters: two votes up and two means down, in each of two rounds."""
    star = TINY | {
        "method": "fedsoft",
        "clients": 2,
        "rounds": 2,
        "topology": {"kind": "star"},
        "fedsoft": {"select": 2},
    }
    assert fedspd.run(star).summary["models_sent"] == 2 * 2 * (2 + 2)


def test_all_documents_are_valid_json(result):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    documents = [*result.folder.glob("*.json"), *(result.folder / "checkpoints").rglob("*.json")]
    assert len(documents) == 5
    for text in [path.read_text() for path in documents] + (
        result.folder / "events.jsonl"
    ).read_text().splitlines():
        json.loads(text, parse_constant=refuse)


# ---- alarms


@pytest.mark.parametrize("method", ["fedspd", "fedavg", "local"])
def test_a_learning_rate_that_diverges_is_an_alarm_and_no_crash(method, tmp_path):
    config = TINY | {
        "method": method,
        "training": {"lr": 1e6},
        "fedspd": {"align_every": 1},
        "rounds": 3,
    }
    result = fedspd.run(config, out=tmp_path / "a", workers=2)
    assert any(
        "The loss is not finite at clients 0, 1, 2, 3: try a smaller training.lr." in alarm
        for alarm in result.summary["alarms"]
    )
    assert "NaN" not in (tmp_path / "a" / "events.jsonl").read_text()


def test_a_warm_up_is_no_alarm():
    result = fedspd.run(TINY | {"fedspd": {"warmup": 1}})
    assert [event["alarms"] for event in result.events()] == [[], [], []]


def measures(table, loss=0.5, test_loss=0.5):
    table_CSD = np.array(table)
    C = len(table_CSD)
    return Measures(np.zeros(C), np.full(C, test_loss), np.full(C, loss), None, table_CSD, None)


def test_an_empty_cluster_is_an_alarm():
    assert alarms(measures([[[5, 5], [0, 0]], [[4, 6], [0, 0]]])) == [
        "Cluster 1 is empty at every client."
    ]
    assert alarms(measures([[[5, 5], [0, 0]], [[4, 5], [0, 1]]])) == []


def test_switched_labels_are_an_alarm():
    straight, switched = [[9, 0], [1, 10]], [[0, 10], [10, 0]]
    assert alarms(measures([straight, straight, straight])) == []
    assert alarms(measures([straight, switched, straight])) == [
        "Labels are switched at clients 1: they name the clusters unlike the rest."
    ]  # fmt: skip


def test_a_loss_that_is_not_finite_is_an_alarm():
    table = [[[9, 0], [1, 10]]] * 10
    sentence = "The loss is not finite at clients 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: try a smaller training.lr."
    assert alarms(measures(table, loss=np.inf)) == [sentence]
    assert alarms(measures(table, test_loss=np.nan)) == [sentence]
    assert alarms(measures(table, loss=np.nan)) == []


def test_of_a_single_client_only_its_own_loss_is_an_alarm():
    """A node may well have all its examples in one cluster, and its number is not 0 in the network."""
    assert alarms(measures([[[5, 5], [0, 0]]])) == []
    assert alarms(measures([[[5, 5], [0, 0]]], loss=np.inf)) == [
        "The loss is not finite: try a smaller training.lr."
    ]


# ---- what stays as it was


def test_global_randomness_and_threads_are_left_alone(result):
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
def test_inside_a_thread(result, workers):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(fedspd.run(TINY, workers=workers).summary["hash"])
    )
    thread.start()
    thread.join(60)
    assert found == [result.summary["hash"]]


def test_a_closure_as_factory_with_two_workers():
    width = 7

    def factory(shape, classes):
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes)
        )

    assert (
        fedspd.run(TINY, model=factory, workers=2).summary["hash"]
        == fedspd.run(TINY, model=factory).summary["hash"]
    )


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
results = [fedspd.run(config, model=lambda shape, classes: Net(classes), workers=workers) for workers in (1, 2)]
assert results[0].summary["hash"] == results[1].summary["hash"]
print(type(results[1].model(0)).__name__)
"""


def test_a_script_without_a_main_guard(tmp_path):
    path = Path(tmp_path / "script.py")
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("Net\n", "")


def test_a_result_in_a_notebook_is_one_line(tmp_path):
    assert repr(fedspd.run(TINY, out=tmp_path / "a")) == f"Result(folder={tmp_path / 'a'!r})"


def test_one_distribution_has_no_purity():
    assert fedspd.run(TINY | {"data": TINY["data"] | {"mixture": "iid"}}).summary["purity"] is None
