"""The format number of run folders and checkpoints."""

import json
from importlib.metadata import version
from pathlib import Path

from fedspd.core.errors import StorageError
from fedspd.storage.atomic import Json

FORMAT = 1  # of run.json, checkpoint.json and the files they describe; raise it with each change


def stamp() -> Json:
    """Return the fields that say which format a file has and which fedspd wrote it."""
    return {"format": FORMAT, "versions": {"fedspd": version("fedspd")}}


def check_format(path: Path, content: Json) -> None:
    """Refuse a file that was written in an older or newer format."""
    found = content.get("format")
    if found == FORMAT:
        return
    writer = content.get("versions", {}).get("fedspd", "of an unknown version")
    raise StorageError(
        f"'{path}': format = {json.dumps(found)}, written by fedspd {writer}; expected {FORMAT}. "
        "Install that version, or start again in another folder."
    )
