"""Trackers: callbacks that write a run's numbers for TensorBoard, Weights & Biases and MLflow.

They get every number of an event: of lists over clients the mean, of other lists each value. Each
writes to this machine; nothing is sent anywhere unless asked for.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from fedspd.core.errors import MissingExtraError
from fedspd.core.metrics import ALL_METRICS
from fedspd.experiment.callbacks import Callback
from fedspd.storage.atomic import Json, flatten

# Fields with a number for each client.
BY_CLIENT = ("accuracy", "test_loss", "loss", "epsilon", *ALL_METRICS)


class TensorBoard(Callback):
    """The callback that writes scalars for TensorBoard, one point per round and field."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError.of("TensorBoard", "tensorboard") from None
        self.folder = folder
        self.writer_class: Any = SummaryWriter
        self.writer: Any = None

    def on_start(self, event: Json) -> None:
        if self.writer is None:  # only now: a run that is refused must leave no folder behind
            self.writer = self.writer_class(str(self.folder))

    def on_round(self, event: Json) -> None:
        for name, value in scalars(event).items():
            self.writer.add_scalar(name, value, event["round"])
        self.writer.flush()

    def on_final(self, event: Json) -> None:
        self.on_round(event)
        self.writer.close()


class WeightsAndBiases(Callback):
    """The callback that writes a run for Weights & Biases: offline, `wandb sync` sends it later.

    Further options go to `wandb.init`: `project`, `name`, or `mode="online"`.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError.of("Weights & Biases", "wandb") from None
        self.init: Any = wandb.init
        self.options = {"project": "fedspd", "mode": "offline", **options, "dir": str(folder)}
        self.run: Any = None

    def on_start(self, event: Json) -> None:
        if self.run is None:
            Path(self.options["dir"]).mkdir(parents=True, exist_ok=True)
            self.run = self.init(config=event["config"], **self.options)

    def on_round(self, event: Json) -> None:
        self.run.log(scalars(event), step=event["round"])

    def on_alarm(self, round: int, alarm: str) -> None:
        if self.run is not None:
            self.run.alert("fedspd", f"round {round}: {alarm}")

    def on_final(self, event: Json) -> None:
        self.on_round(event)
        self.run.finish()


class MLflow(Callback):
    """The callback that writes a run into a local store of MLflow: a database in `folder`.

    `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db` shows it. `tracking_uri` names
    another store.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        experiment: str = "fedspd",
        name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError:
            raise MissingExtraError.of("MLflow", "mlflow") from None
        self.client_class: Any = MlflowClient
        self.metric, self.param = Metric, Param
        self.folder, self.experiment, self.name = Path(folder), experiment, name
        self.tracking_uri = tracking_uri or f"sqlite:///{self.folder.absolute() / 'mlflow.db'}"
        self.client: Any = None
        self.run_id = ""

    def on_start(self, event: Json) -> None:
        if self.client is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.client = self.client_class(tracking_uri=self.tracking_uri)
        found = self.client.get_experiment_by_name(self.experiment)
        artifacts = (self.folder.absolute() / "artifacts").as_uri()
        number = (
            self.client.create_experiment(self.experiment, artifact_location=artifacts)
            if found is None
            else found.experiment_id
        )
        self.run_id = self.client.create_run(number, run_name=self.name).info.run_id
        params = [self.param(key, str(value)) for key, value in flatten(event["config"]).items()]
        self.client.log_batch(self.run_id, params=params)

    def on_round(self, event: Json) -> None:
        now, t = int(1000 * time.time()), event["round"]
        metrics = [self.metric(name, value, now, t) for name, value in scalars(event).items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def on_final(self, event: Json) -> None:
        self.on_round(event)
        self.client.set_terminated(self.run_id)


def scalars(event: Json, prefix: str = "") -> dict[str, float]:
    """Return the numbers of an event by name, as trackers of experiments take them.

    A list by client becomes its mean, and any other list of numbers one entry for each.
    """
    found: dict[str, float] = {}
    for name, value in event.items():
        if name in ("round", "traffic", "edges", "table"):
            continue
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, bool | str) or value is None:
            continue
        elif isinstance(value, list):
            found |= _list_scalars(f"{prefix}{name}", value)
        else:
            found[f"{prefix}{name}"] = float(value)
    return found


def _list_scalars(name: str, values: list[Any]) -> dict[str, float]:
    if values and isinstance(values[0], list):  # the mixture: the mean share of every cluster
        columns = zip(*values, strict=True)
        return {f"{name}/{s}": float(np.mean(column)) for s, column in enumerate(columns)}
    known = [(i, v) for i, v in enumerate(values) if isinstance(v, int | float)]
    field = name.rpartition("/")[2].removeprefix("validation_")
    if field in BY_CLIENT and known:
        return {name: float(np.mean([v for _, v in known]))}
    return {f"{name}/{i}": float(v) for i, v in known}
