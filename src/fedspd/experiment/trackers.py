"""A run's events for other tools, while they happen."""

from pathlib import Path
from typing import Any

import numpy as np

from fedspd.core.errors import MissingExtraError
from fedspd.storage.atomic import Json


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError.of("--tensorboard", "tensorboard") from None
        self.folder = folder
        self.writer_class: Any = SummaryWriter

    def listen(self, event: Json) -> None:
        if event["event"] == "start":
            self.writer = self.writer_class(str(self.folder))
            return
        for name in ("accuracy", "loss", "test_loss"):
            values = [value for value in event.get(name, []) if value is not None]
            if values:
                self.writer.add_scalar(name, float(np.mean(values)), event["round"])
        if event.get("purity") is not None:
            self.writer.add_scalar("purity", event["purity"], event["round"])
        self.writer.flush()
