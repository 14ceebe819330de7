"""What a run under a fault came to, from the journals of its nodes."""

import json
from itertools import pairwise
from statistics import mean

from chaos.faults import Fault
from chaos.fleet import Fleet, Json

Journals = dict[str, list[Json]]
HEARD_WITHIN = 2  # rounds after its restart, a node must have been heard by all its neighbours
POINTS = 2.0  # of accuracy that a fault may cost


def measured(fleet: Fleet, bytes_: int, resets: int, faults: list[Fault], liar: str | None) -> Json:
    journals = read(fleet)
    scores = [events[-1]["accuracy"] for name, events in journals.items() if name != liar]
    rounds = [
        event for events in journals.values() for event in events if event["event"] == "round"
    ]
    missing, heard = (sum(len(event[kind]) for event in rounds) for kind in ("missing", "received"))
    return {
        "accuracy": round(100 * mean(scores), 2),
        "bytes": bytes_,
        "resets": resets,
        "seconds_per_round": round(_seconds_per_round(fleet), 3),
        "left_out": round(100 * missing / (missing + heard), 2),
        "not_done": fleet.rounds * len(journals) - len(rounds),
        "faults": [_told(fault) for fault in faults],
        "problems": [*lost(fleet), *out_of_order(journals), *_unfinished(journals), *late(faults)],
    }


def read(fleet: Fleet) -> Journals:
    return {
        name: [json.loads(line) for line in node.journal.read_text().splitlines()]
        for name, node in fleet.nodes.items()
    }


def _seconds_per_round(fleet: Fleet) -> float:
    """Of the whole network, from its first round that was seen to its last."""
    rounds = [seen for seen in fleet.history if seen.event["event"] == "round"]
    first, last = rounds[0], max(rounds, key=lambda seen: (seen.event["round"], seen.at))
    return (last.at - first.at) / int(last.event["round"] - first.event["round"])


def _told(fault: Fault) -> Json:
    return {
        "what": fault.what,
        "noticed": None if fault.noticed is None else round(fault.noticed - fault.began, 1),
        "healed": round(fault.healed - fault.mended, 1),
        "rounds": fault.rounds,
    }


# ---- what must not be


def lost(fleet: Fleet) -> list[str]:
    """Whatever a killed node had committed is still there; at most the round that it was in is not."""
    found = []
    for killed in fleet.kills:
        if not fleet.nodes[killed.node].journal.read_bytes().startswith(killed.committed):
            found.append(
                f"{killed.node} has lost rounds that it had committed before it was killed"
            )
        if killed.loose > 1:
            found.append(
                f"{killed.node} had {killed.loose} rounds in its journal and in no checkpoint when it was killed"
            )
    return found


def out_of_order(journals: Journals) -> list[str]:
    found = []
    for name, events in journals.items():
        rounds = [event["round"] for event in events]
        if any(later <= earlier for earlier, later in pairwise(rounds)):
            found.append(f"{name} has a round twice, or one after a later one: {rounds}")
    return found


def _unfinished(journals: Journals) -> list[str]:
    return [
        f"{name} did not get to the end"
        for name, events in journals.items()
        if events[-1]["event"] != "final"
    ]


def late(faults: list[Fault]) -> list[str]:
    slow = [fault for fault in faults if fault.restarted and fault.rounds > HEARD_WITHIN]
    return [f"{fault.what}: heard again only after {fault.rounds} rounds" for fault in slow]


def verdict(found: Json, undisturbed: Json, judged: bool) -> list[str]:
    lost = undisturbed["accuracy"] - found["accuracy"]
    low = [f"{lost:.1f} points of accuracy lost"] if judged and lost > POINTS else []
    return [*found["problems"], *low]
