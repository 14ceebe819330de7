"""A run on the disk: nothing is unpickled, and a file stays until its successor is complete.

RUN/
  config.toml       the resolved config; `fedspd run RUN/config.toml` repeats the run
  run.json          format number, versions, machine, config, hashes of data and model
  partition.json    which examples each client has
  topology.json     the graph
  events.jsonl      one line per round
  checkpoints/      round-000012/: checkpoint.json and part-*.safetensors; the newest one counts
  result.json       final scores of every client, totals, the hash of the final parameters
  figures/

A node's journal is a run folder too, of one client, without the files that describe a network. That
of a private node has privacy.json as well: what it has released, and who knows of it.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedspd.core.errors import StorageError
from fedspd.core.machine import file_exists
from fedspd.storage.atomic import (
    Json,
    disk_errors,
    parse_json,
    read_json,
    seal,
    sha256_of,
    sync,
    write_atomically,
)
from fedspd.storage.format import check_format, stamp
from fedspd.storage.lock import Lock

LEDGER = "privacy.json"
LOCK_TIMEOUT_SECONDS = 2.0  # workers of a run that was killed may keep the lock for a moment
# Without these fields, a document is not that of a run.
FIELDS = {
    "run.json": ("config",),
    "partition.json": ("clients", "hash"),
    "topology.json": ("list",),
    "result.json": ("method", "rounds", "accuracy", "clients", "alarms"),
    "compare.json": ("points", "reference"),
}
RESTORE = "Restore it from a copy, or start again in another folder."


class RunFolder:
    """The folder of a run, or of a node's journal; the process that locked it may write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: Lock | None = None

    @classmethod
    def create(cls, folder: Path) -> "RunFolder":
        """Make and lock the folder of a new run; refuse a folder that holds something else."""
        _check_vacant(folder)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        created = cls(folder).lock()
        try:
            _check_vacant(folder)  # again: another process may have begun a run before the lock
        except StorageError:
            created.unlock()
            raise
        with disk_errors(folder):
            (folder / "checkpoints").mkdir(exist_ok=True)
        return created

    @classmethod
    def open(cls, folder: Path) -> "RunFolder":
        """Return the folder of a run that has begun; refuse one of another format."""
        if not file_exists(folder / "run.json"):
            raise StorageError(f"'{folder}': not a run folder; expected a folder with run.json.")
        check_format(folder / "run.json", read_json(folder / "run.json"))
        return cls(folder)

    def lock(self) -> "RunFolder":
        """Make this process the only one that writes."""
        with disk_errors(self.folder):
            (self.folder / ".lock").touch()
            lock = Lock(self.folder / ".lock")
            lock.acquire(f"The run folder '{self.folder}'", LOCK_TIMEOUT_SECONDS)
        self._lock = lock
        return self

    def unlock(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def is_locked(self) -> bool:
        """Return whether a process uses this folder now."""
        lock = Lock(self.folder / ".lock")
        try:
            lock.acquire("", timeout_seconds=0)
        except StorageError:
            return True
        except OSError:  # no lock, or not for this user
            return False
        lock.release()
        return False

    # ---- documents

    def begin(self, about: Json) -> None:
        """Write run.json with the format number: from now on the folder holds a run."""
        self.write("run.json", {**stamp(), **about})

    def write(self, name: str, content: Json | str) -> None:
        """Write a document, as JSON unless it is text."""
        if not isinstance(content, str):
            content = json.dumps(content, indent=1, allow_nan=False) + "\n"
        with disk_errors(self.folder):
            write_atomically(self.folder / name, content)

    def read(self, name: str) -> Json:
        """Return a JSON document."""
        if not (self.folder / name).exists():
            raise StorageError(
                f"'{self.folder}': no {name}; the run did not get that far. Resume it."
            )
        return read_json(self.folder / name)

    def read_complete(self, name: str) -> Json:
        """Return a JSON document that has the fields of its kind."""
        content = self.read(name)
        for field in FIELDS[name]:
            if field not in content:
                path = self.folder / name
                raise StorageError(f"'{path}' is damaged: it has no '{field}'. {RESTORE}")
        return content

    # ---- events

    @property
    def _events_path(self) -> Path:
        return self.folder / "events.jsonl"

    def append(self, event: Json, is_sealed: bool = False) -> None:
        """Append an event to events.jsonl, with a checksum if it is sealed."""
        text = json.dumps(event, separators=(",", ":"), allow_nan=False)
        if is_sealed:
            text = f'{text[:-1]},"crc":{zlib.crc32(text.encode())}}}'
        with disk_errors(self.folder), open(self._events_path, "a") as file:
            file.write(text + "\n")

    def events(self, is_sealed: bool = False) -> Iterator[Json]:
        """Yield every event, without a last line that a crash cut off.

        With `is_sealed`, every line must be complete and have its checksum.
        """
        path = self._events_path
        with open(path if path.exists() else os.devnull, "rb") as file:
            for number, line in enumerate(file, 1):
                damaged = f"'{path}' is damaged in line {number}"
                if is_sealed and not _is_intact(line):
                    raise StorageError(f"{damaged}: its checksum is wrong. {RESTORE}")
                if line.endswith(b"\n"):
                    event = parse_json(line, damaged)
                    event.pop("crc", None)
                    yield event

    def rewind(self, size: int) -> None:
        """Keep the first `size` bytes of the events: the rounds after them run again."""
        path = self._events_path
        found = path.stat().st_size if path.exists() else 0
        if found < size:  # truncate would fill the file up with zeros
            raise StorageError(f"'{path}' is damaged: {found} of {size} bytes are left. {RESTORE}")
        if found > size:
            os.truncate(path, size)

    def _sync_events(self) -> int:
        """Wait until all events are on the disk, and return their size in bytes."""
        if not self._events_path.exists():
            return 0
        with open(self._events_path, "rb+") as file:
            os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    # ---- checkpoints

    @contextmanager
    def checkpoint(self, round: int, content: Json, kept: int = 1) -> Iterator[Path]:
        """Yield a folder for the parts of a checkpoint, of which the newest are kept.

        It becomes the newest checkpoint when the block ends, and disappears if the block fails.
        """
        final = self.folder / "checkpoints" / f"round-{round:06d}"
        draft = final.with_name(f"{final.name}.draft-{os.getpid()}")
        older = self._checkpoints()
        with disk_errors(self.folder):
            try:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
                yield draft
                self._describe(draft, content)
                sync(draft)
                shutil.rmtree(final, ignore_errors=True)
                os.replace(draft, final)
                sync(final.parent)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        others = [path for path in older if path != final]
        for stale in others[: max(0, len(others) + 1 - kept)]:
            shutil.rmtree(stale, ignore_errors=True)

    def _describe(self, draft: Path, content: Json) -> None:
        """Write checkpoint.json, the last file of a checkpoint."""
        sums = {part.name: sha256_of(part) for part in sorted(draft.glob("*.safetensors"))}
        described = {**stamp(), **content, "events": self._sync_events(), "parts": sums}
        write_atomically(draft / "checkpoint.json", seal(described))

    def latest(self) -> tuple[Path, Json] | None:
        """Return the folder and the checkpoint.json of the newest complete checkpoint, verified."""
        if self._lock is not None:  # without it, a draft may belong to a process at work
            self._remove_drafts()
        checkpoints = self._checkpoints()
        return (checkpoints[-1], _verified(checkpoints[-1])) if checkpoints else None

    def kept_rounds(self) -> list[int]:
        """Return the rounds of the checkpoints that are kept, oldest first."""
        return [int(path.name.removeprefix("round-")) for path in self._checkpoints()]

    def roll_back(self, round: int) -> None:
        """Make the checkpoint of a round the newest one, and forget all that came later.

        After a crash in the middle, the newest one is complete.
        """
        target = self.folder / "checkpoints" / f"round-{round:06d}"
        events = _verified(target)["events"]
        with disk_errors(self.folder):
            for later in [path for path in reversed(self._checkpoints()) if path > target]:
                os.replace(later, later.with_name(f"{later.name}.draft-{os.getpid()}"))
            sync(target.parent)
        self._remove_drafts()
        self.rewind(events)

    def copy_rounds(self, target: "RunFolder") -> None:
        """Copy the oldest checkpoint that is kept, and the events up to it, to a new run."""
        path = self._checkpoints()[0]
        final = target.folder / "checkpoints" / path.name
        draft = final.with_name(f"{final.name}.draft-{os.getpid()}")
        with disk_errors(target.folder):
            events = self._events_path.read_bytes()[: _verified(path)["events"]]
            target._events_path.write_bytes(events)
            for stale in (draft, final):  # of a start that ended before run.json
                shutil.rmtree(stale, ignore_errors=True)
            shutil.copytree(path, draft)
            sync(draft)
            os.replace(draft, final)
            sync(final.parent)

    def reopen(self) -> None:
        """Go back to the last round of a finished or stopped run, so that more can follow."""
        with disk_errors(self.folder):
            (self.folder / "result.json").unlink(missing_ok=True)
            if (latest := self.latest()) and latest[1].get("is_final"):
                if len(self._checkpoints()) < 2:
                    raise StorageError(
                        f"'{self.folder}': the state before the final phase is missing, so the run "
                        "cannot go on. Start a new run."
                    )
                shutil.rmtree(latest[0])
                latest = self.latest()
            if latest and latest[1].get("stopped"):
                content = {key: value for key, value in latest[1].items() if key != "sha256"}
                path = latest[0] / "checkpoint.json"
                write_atomically(path, seal({**content, "stopped": None}))

    def _checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        found = (self.folder / "checkpoints").glob("round-*")
        return sorted(path for path in found if path.name.removeprefix("round-").isdigit())

    def _remove_drafts(self) -> None:
        for draft in (self.folder / "checkpoints").glob("*.draft-*"):
            shutil.rmtree(draft, ignore_errors=True)


def _is_intact(line: bytes) -> bool:
    text, _, _ = line.rpartition(b',"crc":')
    return line == text + f',"crc":{zlib.crc32(text + b"}")}}}\n'.encode()


def _check_vacant(folder: Path) -> None:
    """Accept a folder that is absent, empty, or left by a start that ended before run.json."""
    if file_exists(folder / "run.json"):
        raise StorageError(
            f"'{folder}': the folder holds a run already; expected a new or an empty folder. "
            "Resume the run, or choose another folder."
        )
    is_ours = (folder / ".lock").exists()
    if folder.exists() and not is_ours and not (folder.is_dir() and not any(folder.iterdir())):
        raise StorageError(
            f"'{folder}': not a run folder, and not empty; expected a new or an empty folder. "
            "Choose another folder."
        )


def _verified(checkpoint: Path) -> Json:
    """Return what checkpoint.json says, once it and all parts are as they were written."""
    path = checkpoint / "checkpoint.json"
    content = read_json(path)
    check_format(path, content)
    unsealed = {key: value for key, value in content.items() if key != "sha256"}
    if seal(unsealed) != path.read_text("utf-8"):
        raise StorageError(f"'{path}' is damaged: its SHA-256 is not the recorded one. {RESTORE}")
    for name, expected in content["parts"].items():
        part = checkpoint / name
        if not part.exists() or sha256_of(part) != expected:
            raise StorageError(
                f"'{part}': checkpoint file missing or damaged; its SHA-256 is not the recorded "
                f"one. {RESTORE}"
            )
    return content
