"""A run on disk. Nothing here is ever unpickled, and nothing is replaced before its successor is whole.

RUN/
  config.toml       the resolved config; `fedspd run RUN/config.toml` repeats the run
  run.json          format number, versions, machine, hashes of config and data
  partition.json    who got which examples
  events.jsonl      one line per round
  checkpoints/      round-000012/: checkpoint.json, part-*.safetensors; the newest whole one counts
  result.json       every client's final scores, totals, the hash of the final parameters
  figures/
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from fedspd.core.errors import StorageError
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
from fedspd.storage.lock import Lock

LOCK_TIMEOUT_SECONDS = 2.0
FORMAT = 1  # of run.json and checkpoint.json; raise it when other versions cannot read the folder


class RunFolder:
    """The run folder, held by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: Lock | None = None

    @classmethod
    def create(cls, folder: Path) -> "RunFolder":
        _refuse_unless_vacant(folder)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        record = cls(folder).lock()  # makes the folder ours before there is anything else in it
        try:
            _refuse_unless_vacant(folder)  # nor has somebody else begun a run here while we waited
        except StorageError:
            record.unlock()
            raise
        with disk_errors(folder):
            (folder / "checkpoints").mkdir(exist_ok=True)
        return record

    @classmethod
    def open(cls, folder: Path) -> "RunFolder":
        if not (folder / "run.json").exists():
            raise StorageError(f"'{folder}' is not a run folder: there is no run.json in it.")
        check_format(folder / "run.json", read_json(folder / "run.json"))
        return cls(folder)

    def lock(self) -> "RunFolder":
        """The workers of a run that was killed may hold its folder for a moment more."""
        with disk_errors(self.folder):
            (self.folder / ".lock").touch()
            lock = Lock(self.folder / ".lock")
            lock.acquire(f"The run folder '{self.folder}'", LOCK_TIMEOUT_SECONDS)
        self._lock = lock
        return self

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # ---- documents

    def begin(self, about: Json) -> None:
        """Write run.json, stamped with the format: from now on the folder holds a run."""
        self.write("run.json", {**stamp(), **about})

    def write(self, name: str, content: Json | str) -> None:
        with disk_errors(self.folder):
            text = (
                content
                if isinstance(content, str)
                else json.dumps(content, indent=1, allow_nan=False) + "\n"
            )
            write_atomically(self.folder / name, text)

    def read(self, name: str) -> Json:
        if not (self.folder / name).exists():
            raise StorageError(f"'{self.folder}' has no {name}: the run did not get that far.")
        return read_json(self.folder / name)

    # ---- events

    def append(self, event: Json) -> None:
        with disk_errors(self.folder), open(self.folder / "events.jsonl", "a") as file:
            file.write(json.dumps(event, separators=(",", ":"), allow_nan=False) + "\n")

    def events(self) -> Iterator[Json]:
        """Every event; a last line that was cut off by a crash is passed over."""
        path = self.folder / "events.jsonl"
        with open(path, "rb") if path.exists() else open(os.devnull, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield parse_json(line, f"'{path}' is damaged in line {number}")

    def _events_size(self) -> int:
        path = self.folder / "events.jsonl"
        if not path.exists():
            return 0
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    # ---- checkpoints

    @contextmanager
    def checkpoint(self, round: int, content: Json) -> Iterator[Path]:
        """A folder to write parts into; it becomes the newest checkpoint when the block ends, or leaves no trace."""
        final = self.folder / "checkpoints" / f"round-{round:06d}"
        draft = final.with_name(f"{final.name}.draft-{os.getpid()}")
        older = self._checkpoints()
        with disk_errors(self.folder):
            try:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
                yield draft
                sums = {part.name: sha256_of(part) for part in sorted(draft.glob("*.safetensors"))}
                write_atomically(
                    draft / "checkpoint.json",
                    seal({**stamp(), **content, "events": self._events_size(), "parts": sums}),
                )
                shutil.rmtree(final, ignore_errors=True)
                sync(draft)
                os.replace(draft, final)
                sync(final.parent)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        for stale in older:
            if stale != final:
                shutil.rmtree(stale, ignore_errors=True)

    def _checkpoints(self) -> list[Path]:
        return sorted(
            p
            for p in (self.folder / "checkpoints").glob("round-*")
            if p.name.removeprefix("round-").isdigit()
        )

    def latest(self) -> tuple[Path, Json] | None:
        """The newest whole checkpoint and what it says of itself."""
        if self._lock is not None:  # else a draft may be somebody's who is at work on it
            self._sweep()
        if not (found := self._checkpoints()):
            return None
        folder = found[-1]
        content = read_json(folder / "checkpoint.json")
        check_format(folder / "checkpoint.json", content)
        if seal({key: value for key, value in content.items() if key != "sha256"}) != (
            folder / "checkpoint.json"
        ).read_text("utf-8"):
            raise StorageError(
                f"'{folder / 'checkpoint.json'}' is damaged: restore it from a copy, or start anew in another folder."
            )
        for name, expected in content["parts"].items():
            if not (folder / name).exists() or sha256_of(folder / name) != expected:
                raise StorageError(
                    f"The checkpoint file '{folder / name}' is missing or damaged (its SHA-256 is not the one recorded): "
                    "restore it from a copy, or start anew in another folder."
                )
        return folder, content

    def _sweep(self) -> None:
        for draft in (self.folder / "checkpoints").glob("*.draft-*"):
            shutil.rmtree(draft, ignore_errors=True)

    def rewind(self, size: int) -> None:
        """Forget the events of rounds that will be run again."""
        path = self.folder / "events.jsonl"
        found = path.stat().st_size if path.exists() else 0
        if found < size:  # else it would be filled up with zeros
            raise StorageError(
                f"'{path}' is damaged: {found} bytes are left of {size}; restore it from a copy, or start anew in another folder."
            )
        if found > size:
            os.truncate(path, size)


def stamp() -> Json:
    """Return the fields that say which format a file has and which fedspd wrote it."""
    return {"format": FORMAT, "versions": {"fedspd": version("fedspd")}}


def check_format(path: Path, content: Json) -> None:
    """Refuse a file that was written in an older or newer format."""
    if (found := content.get("format")) == FORMAT:
        return
    writer = content.get("versions", {}).get("fedspd", "of an unknown version")
    raise StorageError(
        f"'{path}': format = {json.dumps(found)}, written by fedspd {writer}; expected {FORMAT}. "
        "Install that version, or start again in another folder."
    )


def _refuse_unless_vacant(folder: Path) -> None:
    """Vacant: absent, empty, or left by a start that was cut short, before run.json was written."""
    begun = (folder / "run.json").exists()
    ours = (folder / ".lock").exists() and not begun
    if not folder.exists() or ours or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not begun:
        raise StorageError(f"'{folder}' exists and is no run: give another folder with --out.")
    raise StorageError(
        f"The run folder '{folder}' exists: continue it with 'fedspd run --resume {folder}', or give another one with --out."
    )
