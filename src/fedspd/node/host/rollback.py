"""Take a stopped node back to an earlier round."""

from pathlib import Path

from fedspd.core.errors import StorageError
from fedspd.core.machine import file_exists
from fedspd.node.host.bundle import Bundle
from fedspd.node.peer.journal import Journal


def roll_back(bundle: Bundle, to: int, state: Path | None = None) -> int:
    """Take the node back to the state after a round; return the round that it was after."""
    folder = bundle.journal_folder(state)
    if not file_exists(folder / "run.json"):
        raise StorageError(
            f"--state {folder}: no journal of a node; expected a folder with run.json. "
            "Run the node first, or give its folder with --state."
        )
    journal = Journal(folder, bundle.owner)
    try:
        return journal.roll_back(to)
    finally:
        journal.close()
