"""TensorBoard, Weights & Biases and MLflow, with the real packages where they are installed.

They are not part of the development environment: `pip install tensorboard wandb mlflow-skinny
sqlalchemy alembic` into another one runs these tests.
"""

import struct
import sys

import pytest

import fedspd
from fedspd.core.errors import MissingExtraError
from fedspd.experiment.trackers import scalars

TINY = {
    "method": "fedspd",
    "clients": 3,
    "rounds": 2,
    "metrics": ["macro_f1"],
    "data": {"examples": 30, "test_examples": 10},
    "topology": {"kind": "ring"},
}


def tracked(callback):
    """Return the numbers of a run's events that a tracker must have, by name and round."""
    result = fedspd.run(TINY, callbacks=[callback])
    events = {event["round"]: scalars(event) for event in result.events()}
    assert {"accuracy", "macro_f1", "bytes/point_to_point", "mixture/1"} <= set(events[1])
    return {(name, t): value for t, found in events.items() for name, value in found.items()}


@pytest.mark.long
def test_tensorboard_has_every_number_of_the_events(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = tracked(fedspd.TensorBoard(tmp_path))
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    names = reader.Tags()["scalars"]
    found = {(name, e.step): e.value for name in names for e in reader.Scalars(name)}
    assert found == {key: pytest.approx(value, rel=1e-6) for key, value in expected.items()}


def read_log(content):
    """Yield the records of a log as LevelDB writes it: blocks of 32 kB, after a header here."""
    at, parts = 7, []
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        parts.append(content[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):  # complete, or the last part
            yield b"".join(parts)
            parts = []


@pytest.mark.long
def test_weights_and_biases_has_every_number_offline(tmp_path):
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    from wandb.proto import wandb_internal_pb2

    callback = fedspd.WeightsAndBiases(tmp_path, name="tiny")
    expected = tracked(callback)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found, keys = {}, set()
    for data in read_log(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for update in record.run.config.update:
            keys.add(update.key)
        items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
        step = record.history.step.num
        found |= {(n, step): float(v) for n, v in items.items() if not n.startswith("_")}
    assert found == {key: pytest.approx(value) for key, value in expected.items()}
    assert {"method", "training", "clients"} <= keys


@pytest.mark.long
def test_mlflow_has_every_number_in_a_local_store(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    expected = tracked(fedspd.MLflow(tmp_path, name="tiny"))
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "fedspd"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.batch"] == "50"
    found = {
        (name, metric.step): metric.value
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    }
    assert found == {key: pytest.approx(value) for key, value in expected.items()}
    tracked(fedspd.MLflow(tmp_path, name="again"))  # a second run in the same store
    assert len(client.search_runs([experiment.experiment_id])) == 2


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("wandb", "WeightsAndBiases", "wandb"),
        ("mlflow", "MLflow", "mlflow"),
        ("torch.utils.tensorboard", "TensorBoard", "tensorboard"),
    ],
)
def test_tracker_names_its_extra(monkeypatch, tmp_path, module, make, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'fedspd\[{extra}\]'"):
        getattr(fedspd, make)(tmp_path)
    assert not list(tmp_path.iterdir())
