"""Files that are written as a whole or not at all, and disk errors as sentences."""

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


def read_json(path: Path) -> Json:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise storage_error(error, f"'{path}' could not be read: {error}.") from None
    return parse_json(text, f"'{path}' is damaged")


def seal(content: Json) -> str:
    """The content as text, with a hash of itself: a single bit that changes on the disk is noticed."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def parse_json(text: bytes, complaint: str) -> Json:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise StorageError(f"{complaint}: {error}.") from None
    if not isinstance(found, dict):
        raise StorageError(f"{complaint}: expected a JSON object.")
    return found


def write_atomically(path: Path, text: str) -> None:
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


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns what the disk refuses into a sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (
            errno.ENOSPC,
            errno.EDQUOT,
        ) or "No space left" in str(error)
        reason = "the disk is full" if full else str(error)
        sentence = f"The run folder '{folder}' could not be written ({reason}): put that right, then {_again(folder)}."
        raise storage_error(error, sentence) from None


def storage_error(error: Exception, sentence: str) -> FedspdError:
    """A lack of file descriptors passes; whatever else a disk refuses, a person must put right."""
    passes = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
    return WorkerError(sentence) if passes else StorageError(sentence)


def _again(folder: Path) -> str:
    """How a person goes on with what the folder holds: a run, or the rounds of a node."""
    if not (folder / "run.json").exists():
        return "start the run again"
    return (
        "start the node again"
        if "node" in read_json(folder / "run.json")
        else f"continue with 'fedspd run --resume {folder}'"
    )


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
