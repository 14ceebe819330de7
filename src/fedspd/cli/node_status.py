"""A node's status for a person."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedspd.core.errors import StorageError
from fedspd.node.host.status import ask_status
from fedspd.node.identity.manifest import file_exists
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder


def status_of(folder: Path) -> Json:
    """Of the running node, else what its journal says."""
    if not file_exists(folder / "run.json"):
        raise StorageError(
            f"--state {folder}: no journal of a node; expected a folder with run.json. "
            "Start the node with 'fedspd node run', or give its folder with --state."
        )
    record = RunFolder.open(folder)
    name = record.read("run.json").get("node")
    found = ask_status(folder)
    if (
        found is not None and found.get("node") == name
    ):  # a port may have gone from a node that was killed to another
        return found
    last = next(reversed(list(record.events())), {})
    return {
        "node": name,
        "running": False,
        "round": last.get("round", 0),
        "done": last.get("event") == "final",
        "last_round": last,
    }


def show(status: Json) -> None:
    console, last = (
        Console(markup=False, emoji=False),
        status["last_round"],
    )  # what neighbours say is text, whatever is in it
    state = "running" if status["running"] else "not running"
    of = f" of {status['rounds']}" if "rounds" in status else ""
    where = "every round is done" if status["done"] else f"round {status['round']}{of}"
    console.print(f"{status['node']}: {state}, {where}", highlight=False)
    for name in ("accuracy", "mixture", "loss"):
        if last.get(name) is not None:
            console.print(f"{name}: {last[name]}")
    if status["running"]:
        console.print(neighbours(status))
        for name, known in status["neighbours"].items():
            if known["last_error"]:
                console.print(f"{name}: {known['last_error']}", highlight=False)
        refused = ", ".join(f"{reason}: {count}" for reason, count in status["refused"].items())
        console.print(f"refused: {refused or 'nothing'}")


def neighbours(status: Json) -> Table:
    table = Table("neighbour", "alive", "round", "seen (s ago)", "sent (kB)", "received (kB)")
    for name, known in status["neighbours"].items():
        sent, received = (
            status["bytes"][kind].get(name, 0) / 1000 for kind in ("sent", "received")
        )
        alive = "muted" if known["muted"] else "yes" if known["alive"] else "no"
        seen = "never" if known["seen_seconds_ago"] is None else f"{known['seen_seconds_ago']:.1f}"
        table.add_row(name, alive, str(known["round"]), seen, f"{sent:,.0f}", f"{received:,.0f}")
    return table
