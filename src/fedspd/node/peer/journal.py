"""The journal of a node: its state after every round, and an event for each.

The journal is a run folder of one client. Each round is written ahead, before it is acknowledged,
so kill -9 at any instant loses at most the running round.
"""

import hashlib
import time
from pathlib import Path

from fedspd.core.block import Block
from fedspd.core.errors import StorageError
from fedspd.core.metrics import ALL_METRICS
from fedspd.experiment.events import metrics_fields
from fedspd.runtime.block_runner import BlockRunner
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

CLIENT_METRICS = ("accuracy", "test_loss", "loss", "mixture", *ALL_METRICS)
KEPT_CHECKPOINTS = 5  # to roll back to, after a neighbour has spoilt the models
RESULT_FIELDS = ("accuracy", *ALL_METRICS, "mixture", "hash")


class Journal:
    """The locked run folder of one node."""

    def __init__(self, folder: Path, owner: Json) -> None:
        """Open or create the journal of a node, and refuse the folder of another owner."""
        if (folder / "run.json").exists():
            self.run_folder = RunFolder.open(folder)
            check_owner(self.run_folder, owner)
            self.run_folder.lock()
        else:
            self.run_folder = RunFolder.create(folder)
            self.run_folder.begin({**owner, "sealed": True})
        # a journal that an older version began has no checksums
        self._is_sealed = bool(self.run_folder.read("run.json").get("sealed"))
        self.last: Json = {}
        self.round_seconds: list[float] = []  # of the rounds before this start
        self.idle_seconds = 0.0  # since the last of them, by this device's wall clock
        self._data: Json = {}  # fingerprint of the data that the state depends on

    def close(self) -> None:
        """Unlock the folder."""
        self.run_folder.unlock()

    def restore(self, runner: BlockRunner, is_newcomer: bool) -> int:
        """Return the number of committed rounds and load the state after them.

        Without any, the runner begins; a newcomer has no state before it has joined.
        """
        self._data = fingerprint(runner.plan.train)
        latest = self._find_latest()
        if latest is None:
            self._check_lost()
            self.run_folder.rewind(0)
            if not is_newcomer:
                runner.begin()
            return 0
        folder, content = latest
        self._check_data(content["data"])
        runner.load(folder)
        self.run_folder.rewind(content["events"])
        events = list(self.run_folder.events(self._is_sealed))
        self.last = next(reversed(events), {})
        self.round_seconds = [one["seconds"]["total"] for one in events if one["event"] == "round"]
        self.idle_seconds = time.time() - (folder / "checkpoint.json").stat().st_mtime
        return int(content["round"])

    def _find_latest(self) -> tuple[Path, Json] | None:
        """Return the newest checkpoint; if it is damaged, name an earlier one."""
        try:
            return self.run_folder.latest()
        except StorageError as error:
            earlier = self.run_folder.kept_rounds()[:-1]
            if not earlier:
                raise
            raise StorageError(
                f"{error} Or go back with 'fedspd node rollback --to {earlier[-1]}'."
            ) from None

    def _check_lost(self) -> None:
        """Refuse to begin again where rounds were committed; a crash leaves at most one event."""
        if len(list(self.run_folder.events())) > 1:
            raise StorageError(
                f"--state {self.run_folder.folder}: events.jsonl has committed rounds, but "
                "checkpoints/ is lost; expected both. Restore it from a copy, or start in another "
                "folder with --state."
            )

    def _check_data(self, before: Json) -> None:
        """Refuse other data: the state assigns examples to clusters by their position."""
        if before != self._data:
            raise StorageError(
                f"--data: the training data have changed since the last round ({before['examples']}"
                f" examples then, {self._data['examples']} now); expected the same data. "
                "Give them, or start in another folder with --state."
            )

    def roll_back(self, to: int) -> int:
        """Go back to the checkpoint of an earlier round; return the last round that is given up."""
        kept = self.run_folder.kept_rounds()
        if to not in kept[:-1]:
            known = ", ".join(map(str, kept[:-1])) or "none"
            raise StorageError(
                f"--to {to}: no earlier checkpoint of that round is kept; expected one of: "
                f"{known}. Give one of these rounds."
            )
        (self.run_folder.folder / "result.json").unlink(missing_ok=True)
        self.run_folder.roll_back(to)
        return kept[-1]

    def commit(self, runner: BlockRunner, round: int, about: Json, measure: bool) -> None:
        """Write the state and the event of a round."""
        self._write(runner, round, {"event": "round", "round": round, **about}, measure)

    def finish(self, runner: BlockRunner, round: int) -> None:
        """Run the final phase and write its result, unless an earlier start has done so."""
        if self.last.get("event") != "final":
            runner.finish(round)
            self._write(runner, round, {"event": "final", "round": round}, True)
        result = {name: self.last[name] for name in RESULT_FIELDS if name in self.last}
        self.run_folder.write("result.json", {"round": round - 1, **result})

    def count_rounds_alone(self) -> int:
        """Return in how many rounds the node used no neighbour's model."""
        events = self.run_folder.events(self._is_sealed)
        return sum(one["event"] == "round" and not one["received"] for one in events)

    def _write(self, runner: BlockRunner, round: int, event: Json, measure: bool) -> None:
        metrics = _client_metrics(metrics_fields(runner.measure())) if measure else {}
        _, steps = runner.take_counters()
        event = {**event, "steps": steps, **metrics, "hash": runner.digests()[0]}
        self.run_folder.append(event, self._is_sealed)
        content = {"round": round, "data": self._data}
        with self.run_folder.checkpoint(round, content, KEPT_CHECKPOINTS) as folder:
            runner.save(folder)
        self.last = event


def fingerprint(train: Block) -> Json:
    """Return the size and the hash of a node's own data."""
    ((x,), (y,)) = train.x, train.y
    digest = hashlib.sha256()
    for tensor in (x, y):
        digest.update(tensor.contiguous().numpy().tobytes())
    return {"examples": len(y), "sha256": digest.hexdigest()}


def _client_metrics(metrics: Json) -> Json:
    """Return the metrics of the only client, without those of a network."""
    own = {name: values[0] for name, values in metrics.items() if name in CLIENT_METRICS}
    return {**own, "alarms": metrics["alarms"]}


def check_owner(run_folder: RunFolder, owner: Json) -> None:
    """Refuse the journal of another network, node or agreement."""
    before = run_folder.read("run.json")
    for name in ("network", "node", "agreement"):
        if before.get(name) != owner[name]:
            raise StorageError(
                f"--state {run_folder.folder}: belongs to another {name} ({before.get(name)}, not "
                f"{owner[name]}); expected this node's own folder. Give one with --state."
            )
