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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedspd.core.errors import FedspdError, RecordError, WorkerError

Json = dict[str, Any]
PATIENCE = 2.0  # seconds


class Record:
    """The run folder, held by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None

    @classmethod
    def create(cls, folder: Path) -> "Record":
        _refuse_unless_vacant(folder)
        with disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
        record = cls(folder).hold()  # makes the folder ours before there is anything else in it
        try:
            _refuse_unless_vacant(folder)  # nor has somebody else begun a run here while we waited
        except RecordError:
            record.release()
            raise
        with disk(folder):
            (folder / "checkpoints").mkdir(exist_ok=True)
        return record

    @classmethod
    def open(cls, folder: Path) -> "Record":
        if not (folder / "run.json").exists():
            raise RecordError(f"'{folder}' is not a run folder: there is no run.json in it.")
        return cls(folder)

    def hold(self) -> "Record":
        """The workers of a run that was killed may hold its folder for a moment more."""
        with disk(self.folder):
            self._lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
        end = time.monotonic() + PATIENCE
        while not _locked(self._lock):
            if time.monotonic() > end:
                os.close(self._lock)
                self._lock = None
                raise RecordError(f"The run folder '{self.folder}' is in use by another process: wait for it, or stop it.")
            time.sleep(0.05)
        return self

    def release(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a fork has the lock too, and would keep it
            os.close(self._lock)
            self._lock = None

    # ---- documents

    def write(self, name: str, content: Json | str) -> None:
        with disk(self.folder):
            text = content if isinstance(content, str) else json.dumps(content, indent=1, allow_nan=False) + "\n"
            write_atomically(self.folder / name, text)

    def read(self, name: str) -> Json:
        if not (self.folder / name).exists():
            raise RecordError(f"'{self.folder}' has no {name}: the run did not get that far.")
        return _read_json(self.folder / name)

    # ---- events

    def append(self, event: Json) -> None:
        with disk(self.folder), open(self.folder / "events.jsonl", "a") as file:
            file.write(json.dumps(event, separators=(",", ":"), allow_nan=False) + "\n")

    def events(self) -> Iterator[Json]:
        """Every event; a last line that was cut off by a crash is passed over."""
        path = self.folder / "events.jsonl"
        with open(path, "rb") if path.exists() else open(os.devnull, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield _parsed(line, f"'{path}' is damaged in line {number}")

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
                write_atomically(draft / "checkpoint.json", _sealed({**content, "events": self._events_size(), "parts": sums}))
                shutil.rmtree(final, ignore_errors=True)
                _sync(draft)
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
        if self._lock is not None:  # else a draft may be somebody's who is at work on it
            self._sweep()
        if not (found := self._checkpoints()):
            return None
        folder = found[-1]
        content = _read_json(folder / "checkpoint.json")
        if _sealed({key: value for key, value in content.items() if key != "sha256"}) != (folder / "checkpoint.json").read_text("utf-8"):
            raise RecordError(f"'{folder / 'checkpoint.json'}' is damaged: restore it from a copy, or start anew in another folder.")
        for name, expected in content["parts"].items():
            if not (folder / name).exists() or _sha256(folder / name) != expected:
                raise RecordError(
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
            raise RecordError(
                f"'{path}' is damaged: {found} bytes are left of {size}; restore it from a copy, or start anew in another folder."
            )
        if found > size:
            os.truncate(path, size)


def _refuse_unless_vacant(folder: Path) -> None:
    """Vacant: absent, empty, or left by a start that was cut short, before run.json was written."""
    begun = (folder / "run.json").exists()
    ours = (folder / ".lock").exists() and not begun
    if not folder.exists() or ours or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not begun:
        raise RecordError(f"'{folder}' exists and is no run: give another folder with --out.")
    raise RecordError(f"The run folder '{folder}' exists: continue it with 'fedspd run --resume {folder}', or give another one with --out.")


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_json(path: Path) -> Json:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise _failure(error, f"'{path}' could not be read: {error}.") from None
    return _parsed(text, f"'{path}' is damaged")


def _sealed(content: Json) -> str:
    """The content as text, with a hash of itself: a single bit that changes on the disk is noticed."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def _parsed(text: bytes, complaint: str) -> Json:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RecordError(f"{complaint}: {error}.") from None
    if not isinstance(found, dict):
        raise RecordError(f"{complaint}: expected a JSON object.")
    return found


def write_part(folder: Path, clients: list[int], tensors: dict[str, Tensor]) -> str:
    """The rows of some consecutive clients, into the draft of a checkpoint."""
    name = f"part-{clients[0]:06d}-{clients[-1] + 1:06d}.safetensors"
    with disk(folder.parents[1]):  # the run, which is what a person can resume
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
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        _sync(path.parent)
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
        reason = "the disk is full" if full else str(error)
        sentence = f"The run folder '{folder}' could not be written ({reason}): put that right, then {_again(folder)}."
        raise _failure(error, sentence) from None


def _failure(error: Exception, sentence: str) -> FedspdError:
    """A lack of file descriptors passes; whatever else a disk refuses, a person must put right."""
    passes = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
    return WorkerError(sentence) if passes else RecordError(sentence)


def _again(folder: Path) -> str:
    """How a person goes on with what the folder holds: a run, or the rounds of a node."""
    if not (folder / "run.json").exists():
        return "start the run again"
    return "start the node again" if "node" in _read_json(folder / "run.json") else f"continue with 'fedspd run --resume {folder}'"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
