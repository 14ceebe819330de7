"""A run on disk. Nothing here is ever unpickled, and nothing is replaced before its successor is whole.

RUN/
  config.toml       the resolved config; `fedspd run RUN/config.toml` repeats the run
  run.json          versions, machine, hashes of config and data
  manifest.json     who got which examples
  events.jsonl      one line per round
  checkpoints/      round-000012/: checkpoint.json, part-*.safetensors; the newest whole one counts
  result.json       every client's final scores, totals, the hash of the final parameters
  figures/
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedspd.core.errors import RecordError

Json = dict[str, Any]


class Record:
    """The run folder, held by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None

    @classmethod
    def create(cls, folder: Path) -> "Record":
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            hint = f"continue it with 'fedspd run --resume {folder}'" if (folder / "run.json").exists() else "it is not a run"
            raise RecordError(f"The run folder '{folder}' exists and is not empty: {hint}, or give another one with --out.")
        record = cls(folder)
        with disk(folder):
            (folder / "checkpoints").mkdir(parents=True)
        return record.hold()

    @classmethod
    def open(cls, folder: Path) -> "Record":
        if not (folder / "run.json").exists():
            raise RecordError(f"'{folder}' is not a run folder: there is no run.json in it.")
        return cls(folder)

    def hold(self) -> "Record":
        self._lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RecordError(f"The run folder '{self.folder}' is in use by another process: wait for it, or stop it.") from None
        return self

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- documents

    def write(self, name: str, content: Json | str) -> None:
        with disk(self.folder):
            write_atomically(self.folder / name, content if isinstance(content, str) else json.dumps(content, indent=1) + "\n")

    def read(self, name: str) -> Json:
        path = self.folder / name
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            raise RecordError(f"'{self.folder}' has no {name}: the run did not get that far.") from None
        except ValueError as error:
            raise RecordError(f"'{path}' is damaged: {error}.") from None
        if not isinstance(found, dict):
            raise RecordError(f"'{path}' is damaged: expected a JSON object.")
        return found

    # ---- events

    def append(self, event: Json) -> None:
        with disk(self.folder), open(self.folder / "events.jsonl", "a") as file:
            file.write(json.dumps(event, separators=(",", ":")) + "\n")

    def events(self) -> Iterator[Json]:
        """Every event; a last line that was cut off by a crash is passed over."""
        path = self.folder / "events.jsonl"
        with open(path) if path.exists() else open(os.devnull) as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)

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
        with disk(self.folder):
            try:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
                yield draft
                sums = {part.name: _sha256(part) for part in sorted(draft.glob("*.safetensors"))}
                write_atomically(draft / "checkpoint.json", json.dumps({**content, "events": self._events_size(), "parts": sums}, indent=1))
                shutil.rmtree(final, ignore_errors=True)
                os.replace(draft, final)
                _sync(final.parent)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        for stale in older:
            if stale != final:
                shutil.rmtree(stale, ignore_errors=True)

    def _checkpoints(self) -> list[Path]:
        return sorted(p for p in (self.folder / "checkpoints").glob("round-*") if p.name.removeprefix("round-").isdigit())

    def latest(self) -> tuple[Path, Json] | None:
        """The newest whole checkpoint and what it says of itself."""
        for draft in (self.folder / "checkpoints").glob("*.draft-*"):
            shutil.rmtree(draft, ignore_errors=True)
        for folder in reversed(self._checkpoints()):
            content = json.loads((folder / "checkpoint.json").read_text())
            for name, expected in content["parts"].items():
                if _sha256(folder / name) != expected:
                    raise RecordError(f"The checkpoint file '{folder / name}' is damaged: its SHA-256 is not the one recorded.")
            return folder, content
        return None

    def rewind(self, size: int) -> None:
        """Forget the events of rounds that will be run again."""
        path = self.folder / "events.jsonl"
        if path.exists():
            os.truncate(path, size)


def write_part(folder: Path, clients: list[int], tensors: dict[str, Tensor]) -> str:
    """The rows of some consecutive clients."""
    name = f"part-{clients[0]:06d}-{clients[-1] + 1:06d}.safetensors"
    with disk(folder):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
        _sync(folder / name)
    return name


def read_rows(folder: Path, start: int, stop: int, names: list[str]) -> dict[str, Tensor]:
    """The rows of clients start..stop-1 from all parts."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for path in sorted(folder.glob("part-*.safetensors")):
        first, last = (int(number) for number in path.stem.split("-")[1:])
        low, high = max(start, first), min(stop, last)
        if low >= high:
            continue
        try:
            with safe_open(path, "pt") as file:
                for name in names:
                    found[name].append(file.get_slice(name)[low - first : high - first])
        except SafetensorError as error:
            raise RecordError(f"The checkpoint file '{path}' does not fit this run: {error}.") from None
    return {name: torch.cat(rows) for name, rows in found.items()}


def write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft-{os.getpid()}")
    try:
        with open(draft, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """Turns what the disk refuses into a sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        if full:
            raise RecordError(
                f"The disk is full: '{folder}' could not be written. What was recorded before is whole; "
                f"free some space and continue with 'fedspd run --resume {folder}'."
            ) from None
        raise RecordError(f"'{folder}' could not be written: {error}.") from None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
