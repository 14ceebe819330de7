"""The results of a run under faults, from the journals of its nodes."""

import json
from itertools import pairwise
from statistics import mean

from chaos.faults import Fault
from chaos.fleet import Fleet, Json

Journals = dict[str, list[Json]]
MAX_RECOVERY_ROUNDS = 2  # until all neighbours receive from a restarted node again
MAX_LOSS_POINTS = 2.0  # of accuracy


def summarise(
    fleet: Fleet, bytes_: int, resets: int, faults: list[Fault], byzantine: str | None
) -> Json:
    """Return the results of a run, and its problems as sentences."""
    journals = read_journals(fleet)
    scores = [events[-1]["accuracy"] for name, events in journals.items() if name != byzantine]
    rounds = [
        event for events in journals.values() for event in events if event["event"] == "round"
    ]
    missing, received = (
        sum(len(event[key]) for event in rounds) for key in ("missing", "received")
    )
    return {
        "accuracy": round(100 * mean(scores), 2),
        "bytes": bytes_,
        "resets": resets,
        "seconds_per_round": round(_seconds_per_round(fleet), 3),
        "left_out": round(100 * missing / (missing + received), 2),
        "not_done": fleet.rounds * len(journals) - len(rounds),
        "faults": [_describe(fault) for fault in faults],
        "problems": [
            *find_lost_rounds(fleet),
            *find_disordered_rounds(journals),
            *_find_unfinished(journals),
            *find_slow_recoveries(faults),
        ],
    }


def read_journals(fleet: Fleet) -> Journals:
    """Return the events of every node."""
    return {
        name: [json.loads(line) for line in node.journal.read_text().splitlines()]
        for name, node in fleet.nodes.items()
    }


def _seconds_per_round(fleet: Fleet) -> float:
    """Return the mean time of a round of the network, from the first observed to the last."""
    rounds = [seen for seen in fleet.history if seen.event["event"] == "round"]
    first, last = rounds[0], max(rounds, key=lambda seen: (seen.event["round"], seen.at))
    return (last.at - first.at) / int(last.event["round"] - first.event["round"])


def _describe(fault: Fault) -> Json:
    return {
        "what": fault.what,
        "noticed": None if fault.noticed is None else round(fault.noticed - fault.began, 1),
        "healed": round(fault.healed - fault.mended, 1),
        "rounds": fault.rounds,
    }


# ---- problems


def find_lost_rounds(fleet: Fleet) -> list[str]:
    """Check that a killed node lost no committed round, and at most the one that it was in."""
    found = []
    for kill in fleet.kills:
        if not fleet.nodes[kill.node].read_journal().startswith(kill.committed):
            found.append(f"{kill.node} lost rounds that it had committed before it was killed")
        if kill.uncommitted > 1:
            found.append(
                f"{kill.node} had {kill.uncommitted} rounds in its journal without a checkpoint "
                "when it was killed"
            )
    return found


def find_disordered_rounds(journals: Journals) -> list[str]:
    """Check that the rounds of every node increase."""
    found = []
    for name, events in journals.items():
        rounds = [event["round"] for event in events]
        if any(later <= earlier for earlier, later in pairwise(rounds)):
            found.append(f"{name} has rounds that repeat or go back: {rounds}")
    return found


def _find_unfinished(journals: Journals) -> list[str]:
    return [
        f"{name} did not finish"
        for name, events in journals.items()
        if events[-1]["event"] != "final"
    ]


def find_slow_recoveries(faults: list[Fault]) -> list[str]:
    """Check that all neighbours received from every restarted node soon."""
    return [
        f"{fault.what}: recovered only after {fault.rounds} rounds"
        for fault in faults
        if fault.restarted and fault.rounds > MAX_RECOVERY_ROUNDS
    ]


def judge(found: Json, undisturbed: Json, is_judged: bool) -> list[str]:
    """Return the problems of a run, with the loss of accuracy against the undisturbed run."""
    loss = undisturbed["accuracy"] - found["accuracy"]
    is_too_low = is_judged and loss > MAX_LOSS_POINTS
    return [*found["problems"], *([f"{loss:.1f} points of accuracy lost"] if is_too_low else [])]
