"""A node's folder: its state after every round, committed before the round counts as done, and what happened in each.

It is a run folder (record.py) of one client: kill -9 at any instant loses at most the running round.
"""

import hashlib
from pathlib import Path

from fedspd.core.block import Block
from fedspd.core.errors import StorageError
from fedspd.experiment.events import metrics_fields
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder


class Journal:
    def __init__(self, folder: Path, about: Json) -> None:
        """`about` says what the node takes part in; a folder of something else is refused."""
        if (folder / "run.json").exists():
            check_same(RunFolder.open(folder), about)
            self.record = RunFolder.open(folder).lock()
        else:
            self.record = RunFolder.create(folder)
            self.record.begin(about)
        self.last: Json = {}
        self._data: Json = {}  # what identifies the examples that the state speaks of

    def close(self) -> None:
        self.record.unlock()

    def restore(self, runner: BlockRunner, newcomer: bool) -> int:
        """The rounds that are done, with the state after them; a newcomer without any has no state yet."""
        self._data = fingerprint(runner.plan.train)
        latest = self.record.latest()
        if latest is None:
            self.record.rewind(0)
            if not newcomer:
                runner.begin()
            return 0
        folder, content = latest
        self._check_data(content["data"])
        runner.load(folder)
        self.record.rewind(content["events"])
        self.last = next(reversed(list(self.record.events())), {})
        return int(content["round"])

    def _check_data(self, before: Json) -> None:
        """The state assigns every example to a cluster, by its place among the others."""
        if before != self._data:
            raise StorageError(
                f"The data of this node have changed since its last round ({before['examples']} examples to train on then, "
                f"{self._data['examples']} now): give it the data of then, or begin anew in another folder with --state."
            )

    def commit(self, runner: BlockRunner, round: int, about: Json, measure: bool) -> None:
        self._commit(runner, round, {"event": "round", "round": round, **about}, measure)

    def finish(self, runner: BlockRunner, round: int) -> None:
        """The final phase; a node that is started again after it has nothing left to do."""
        if self.last.get("event") != "final":
            runner.finish(round)
            self._commit(runner, round, {"event": "final", "round": round}, True)
        found: Json = {
            name: self.last[name] for name in ("accuracy", "mixture", "hash") if name in self.last
        }
        self.record.write("result.json", {"round": round - 1, **found})

    def _commit(self, runner: BlockRunner, round: int, event: Json, measure: bool) -> None:
        scores = _of_one(metrics_fields(runner.measure())) if measure else {}
        _, steps = runner.take_counters()
        event = {**event, "steps": steps, **scores, "hash": runner.digests()[0]}
        self.record.append(event)
        with self.record.checkpoint(round, {"round": round, "data": self._data}) as folder:
            runner.save(folder)
        self.last = event


def fingerprint(train: Block) -> Json:
    """Of a node's own examples."""
    ((x,), (y,)) = train.x, train.y
    digest = hashlib.sha256()
    for tensor in (x, y):
        digest.update(tensor.contiguous().numpy().tobytes())
    return {"examples": len(y), "sha256": digest.hexdigest()}


def _of_one(scores: Json) -> Json:
    """The numbers of the only client, without those that describe a network."""
    rows = {
        name: values[0]
        for name, values in scores.items()
        if name in ("accuracy", "test_loss", "loss", "mixture")
    }
    return {**rows, "alarms": scores["alarms"]}


def check_same(record: RunFolder, about: Json) -> None:
    before = record.read("run.json")
    for name in ("network", "node", "agreement"):
        if before.get(name) != about[name]:
            raise StorageError(
                f"The folder '{record.folder}' belongs to another {name} ({before.get(name)}, not {about[name]}): "
                "give this node a folder of its own with --state."
            )
