"""What a round spends of its clients' privacy, in its event."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedspd.core.exchange import Exchange
from fedspd.core.graph import Graph
from fedspd.engines.engine import RoundReport
from fedspd.experiment.events import listed
from fedspd.privacy.ledger import RunLedger, newcomers_entry, round_entry
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder


def add_privacy(
    event: Json, ledger: RunLedger, report: RoundReport, graph: Graph, is_public: bool
) -> None:
    """Add a round to the ledger, and to its event what it released and who stopped sending.

    is_public   whether announcements follow from public information alone
    """
    was_silent = set(ledger.silent)
    about = report.releases, report.traffic, graph, is_public, report.silent, was_silent
    event["privacy"] = ledger.add_round(round_entry(*about))
    if found := silence_alarm(set(report.silent) - was_silent):
        event["alarms"] = [*event.get("alarms", ()), *found]


def newcomers_privacy(ledger: RunLedger, graph: Graph, offers: Exchange) -> Json:
    """Add to the ledger what newcomers have received, and return its entry."""
    if not offers.cluster_CK.shape[1]:  # the method shares nothing
        return ledger.add_round({"releases": [], "received": []})
    return ledger.add_round(newcomers_entry(graph, len(offers.cluster_CK), ledger.silent))


def silent_clients(folder: Path) -> set[int]:
    """Return the clients of a run whose privacy budget is spent."""
    entries = (event.get("privacy", {}) for event in RunFolder(folder).events())
    return {client for entry in entries for client, _ in entry.get("silent", ())}


def silence_alarm(silent: Iterable[int]) -> list[str]:
    """Return a sentence about clients whose privacy budget is spent, if there are any."""
    clients = np.array(sorted(silent))
    if not len(clients):
        return []
    return [
        f"The privacy budget is spent at clients {listed(clients)}: they send nothing more, and "
        "go on listening and training."
    ]
