"""Atomic writes, JSON, and disk errors as sentences; without torch."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fedspd.core.errors import FedspdError, StorageError, WorkerError
from fedspd.core.machine import IS_POSIX

Json = dict[str, Any]


# ---- JSON


def read_json(path: Path) -> Json:
    """Return the JSON object in a file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise storage_error(error, f"'{path}' could not be read: {error}.") from None
    return parse_json(text, f"'{path}' is damaged")


def parse_json(text: bytes, complaint: str) -> Json:
    """Return the JSON object that the text holds; `complaint` begins the sentence of an error."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise StorageError(f"{complaint}: {error}.") from None
    if not isinstance(found, dict):
        raise StorageError(f"{complaint}: expected a JSON object.")
    return found


def seal(content: Json) -> str:
    """Return the content as JSON with its own SHA-256, so that a single flipped bit is noticed."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def flatten(tree: Json, prefix: str = "") -> Json:
    """Return the values of a tree of tables by dotted key."""
    flat: Json = {}
    for key, value in tree.items():
        is_table = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if is_table else {f"{prefix}{key}": value}
    return flat


# ---- files


def write_atomically(path: Path, text: str) -> None:
    """Replace the file once the new text is on the disk; an error leaves the old file."""
    draft = path.with_name(f".{path.name}.draft-{os.getpid()}")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        sync(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk; Windows can do so for files."""
    is_folder = path.is_dir()
    if is_folder and not IS_POSIX:
        return
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows syncs no reader
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- errors


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise a failed write inside the block as a sentence that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = "the disk is full" if _is_disk_full(error) else str(error)
        sentence = f"'{folder}': the folder could not be written ({reason}). Fix the cause, then "
        raise storage_error(error, f"{sentence}{_next_step(folder)}.") from None


def storage_error(error: Exception, sentence: str) -> FedspdError:
    """Return a WorkerError for a lack of file descriptors, which passes, else a StorageError."""
    passes = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
    return WorkerError(sentence) if passes else StorageError(sentence)


def _is_disk_full(error: Exception) -> bool:
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left" in str(error)  # safetensors has the text alone


def _next_step(folder: Path) -> str:
    """Return how a person continues with what the folder holds: a run, a journal, or neither."""
    if not (folder / "run.json").exists():
        return "try again"
    return "start the node again" if "node" in read_json(folder / "run.json") else "resume the run"
