"""A node's status as a table on the terminal."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedspd.core.errors import StorageError
from fedspd.core.machine import file_exists
from fedspd.core.scores import ACCURACY, OTHER_SCORES, RMSE
from fedspd.node.host.status import ask_status
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import LEDGER, RunFolder


def read_status(folder: Path) -> Json:
    """Return the status of a running node, or else the last event of its journal."""
    if not file_exists(folder / "run.json"):
        raise StorageError(
            f"--state {folder}: no journal of a node; expected a folder with run.json. "
            "Start the node with 'fedspd node run', or give its folder with --state."
        )
    run_folder = RunFolder.open(folder)
    name = run_folder.read("run.json").get("node")
    found = ask_status(folder)
    # Another node may have got the port of one that was killed.
    if found is not None and found.get("node") == name:
        return found
    events = list(run_folder.events())
    last = next(reversed(events), {})
    return {
        "node": name,
        "running": False,
        "locked": run_folder.is_locked(),
        "round": last.get("round", 0),
        "done": last.get("event") == "final",
        "privacy": _read_privacy(run_folder, events),
        "last_round": last,
    }


def _read_privacy(run_folder: RunFolder, events: list[Json]) -> Json | None:
    """Return what a private node has spent: its last event may be older than its ledger."""
    if not file_exists(run_folder.folder / LEDGER):
        return None
    from fedspd.node.peer.privacy import read_ledger, report_of  # imports torch

    budgets = [event["privacy"]["budget"] for event in events if "privacy" in event]
    return report_of(read_ledger(run_folder), next(reversed(budgets), None))


def print_status(status: Json) -> None:
    """Print a node's status."""
    # An error of a neighbour is plain text, even if it looks like markup.
    console, last = Console(markup=False, emoji=False), status["last_round"]
    is_silent = status.get("locked", False)
    state = "does not answer, starts, or is suspended" if is_silent else "not running"
    state = "running" if status["running"] else state
    rounds = f" of {status['rounds']}" if "rounds" in status else ""
    progress = "every round is done" if status["done"] else f"round {status['round']}{rounds}"
    console.print(f"{status['node']}: {state}, {progress}", highlight=False)
    scores = [score.name for score in (ACCURACY, RMSE, *OTHER_SCORES)]
    for name in (*scores, "mixture", "loss"):
        if last.get(name) is not None:
            console.print(f"{name}: {last[name]}")
    if privacy := status.get("privacy"):
        console.print(describe_privacy(privacy), highlight=False)
    if status["running"]:
        console.print(build_neighbour_table(status))
        for name, known in status["neighbours"].items():
            if known["last_error"]:
                console.print(f"{name}: {known['last_error']}", highlight=False)
        if status["certificate_until"]:
            console.print(f"certificate valid until: {status['certificate_until'][:10]}")
        rejected = ", ".join(f"{reason}: {count}" for reason, count in status["refused"].items())
        console.print(f"rejected: {rejected or 'nothing'}")


def describe_privacy(report: Json) -> str:
    """Return what a private node has spent, against all neighbours together."""
    budget = "" if report["budget"] is None else f" of {report['budget']:g}"
    end = ": the budget is spent, this node sends nothing more" if report["silent"] else ""
    return f"epsilon: {report['epsilon']:.4g}{budget} at delta = {report['delta']:g}{end}"


def build_neighbour_table(status: Json) -> Table:
    """Return a table with a row for every neighbour."""
    table = Table("neighbour", "state", "round", "last seen (s)", "sent (kB)", "received (kB)")
    for name, known in status["neighbours"].items():
        state = "muted" if known["muted"] else "up" if known["alive"] else "down"
        state = "revoked" if known["revoked"] else state
        seconds = known["seen_seconds_ago"]
        seen = "never" if seconds is None else f"{seconds:.1f}"
        kilobytes = (status["bytes"][key].get(name, 0) / 1000 for key in ("sent", "received"))
        table.add_row(name, state, str(known["round"]), seen, *(f"{kB:,.0f}" for kB in kilobytes))
    return table
