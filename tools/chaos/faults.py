"""The faults, each as a story that is played while a network trains.

A story gets the fleet, the hosts and the relay; it returns what it broke, and when that was noticed and mended.
"""

import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from chaos.fleet import Fleet, Json
from chaos.hosts import Hosts
from chaos.relay import NetworkConditions, Relay

SLICE = 0.05  # seconds that a slow node works, and as many that it does not
HOUR = 3600
LIAR = "node-2"
SOURCE = Path(__file__).parent


class Fault(NamedTuple):
    """Seconds of the harness's clock; None: it did not happen."""

    what: str
    began: float
    noticed: float | None  # the first round that a neighbour committed without the victim
    mended: float
    healed: float  # every neighbour has heard the victim again
    rounds: int  # that the victim needed for it after its return
    restarted: bool


class Stage(NamedTuple):
    fleet: Fleet
    hosts: Hosts
    relay: Relay


Story = Callable[[Stage], list[Fault]]


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    story: Story
    settings: Json = field(default_factory=dict)  # on top of the common config
    prepare: Callable[[Fleet], None] = lambda fleet: None  # before the nodes start
    liar: str | None = None  # whose own accuracy does not count
    judged: bool = True  # must end within two points of the undisturbed run


# ---- stories


def nothing(stage: Stage) -> list[Fault]:
    return []


def kill_each(stage: Stage) -> list[Fault]:
    """SIGKILL at a random moment of a round; restart when the neighbours have gone on; the next one when all hear it again."""
    rng, fleet = random.Random(5), stage.fleet
    fleet.until(lambda: fleet.everyone_at(2))
    return [
        kill(stage, name, rng.uniform(0.0, 1.5))
        for name in rng.sample(list(fleet.nodes), len(fleet.nodes))
    ]


def kill(stage: Stage, name: str, wait: float) -> Fault:
    fleet = stage.fleet
    fleet.pause(wait)
    began = fleet.kill(name)
    fleet.until(lambda: fleet.without(name, began) is not None)
    mended = fleet.restart(name)
    return _healed(fleet, f"SIGKILL {name}", [name], began, mended)


def part(seconds: float) -> Story:
    """The cable between the two halves is cut for a while."""

    def story(stage: Stage) -> list[Fault]:
        fleet = stage.fleet
        fleet.until(lambda: fleet.everyone_at(3))
        stage.hosts.cable("down")
        began = time.monotonic()
        fleet.pause(seconds)
        stage.hosts.cable("up")
        return [
            _healed(
                fleet, f"partition for {seconds:g} s", list(fleet.nodes), began, time.monotonic()
            )
        ]

    return story


def storm(stage: Stage) -> list[Fault]:
    stage.relay.weather = NetworkConditions(delay=0.05, stalled=0.1, reset=0.005)
    return []


def narrow(stage: Stage) -> list[Fault]:
    stage.hosts.narrow(3, "1mbit")
    return []


def slow(stage: Stage) -> list[Fault]:
    """Half of the time one node stands still."""
    process = stage.fleet.nodes["node-5"].process
    assert process is not None
    threading.Thread(target=_stutter, args=(process,), daemon=True).start()
    return []


def _stutter(process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        for sign in (signal.SIGSTOP, signal.SIGCONT):
            process.send_signal(sign)
            time.sleep(SLICE)


def _healed(fleet: Fleet, what: str, victims: Iterable[str], began: float, mended: float) -> Fault:
    """Wait until all neighbours have heard all victims again."""
    victims = list(victims)
    fleet.until(lambda: all(_heard_by_all(fleet, name, mended) for name in victims))
    firsts = [seen for name in victims for seen in fleet.hearing(name, mended).values()]
    noticed = [seen.at for name in victims if (seen := fleet.without(name, began)) is not None]
    needed = max(_rounds(fleet, name, mended) for name in victims)
    return Fault(
        what,
        began,
        min(noticed, default=None),
        mended,
        max(seen.at for seen in firsts),
        needed,
        len(victims) == 1,
    )


def _heard_by_all(fleet: Fleet, name: str, mended: float) -> bool:
    """And it has committed a round itself: a neighbour may be quicker with that."""
    return set(fleet.hearing(name, mended)) >= set(fleet.neighbours[name]) and bool(
        fleet.of(name, mended)
    )


def _rounds(fleet: Fleet, name: str, mended: float) -> int:
    """From the first round that the victim did after its return to the last of those in which a neighbour heard it first."""
    first = min(int(seen.event["round"]) for seen in fleet.of(name, mended))
    return (
        1 - first + max(int(seen.event["round"]) for seen in fleet.hearing(name, mended).values())
    )


# ---- nodes that are not like the others


def lie(fleet: Fleet) -> None:
    fleet.nodes[
        LIAR
    ].program = (
        f"import runpy; runpy.run_path({str(SOURCE / 'byzantine.py')!r}, run_name='__main__')"
    )


def shift_clocks(fleet: Fleet) -> None:
    """The wall clocks of the nodes are hours apart: a library that is loaded before all others tells the time."""
    library = fleet.folder / "clock.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, SOURCE / "clock.c", "-ldl"], check=True
    )
    for i, node in enumerate(fleet.nodes.values()):
        node.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(HOUR * (i - 4))}


# ---- all of them

LONG = {
    "rounds": 240,
    "training.decay": 0.97,
}  # so that there are rounds left when a node, or half of them, comes back
CROWD = {"topology": {"kind": "complete", "weights": "median"}}
CROWD_MEAN = {"topology": {"kind": "complete"}}

SCENARIOS = [
    Scenario(
        "kill",
        "SIGKILL of each node in turn, restart once the neighbours have gone on",
        kill_each,
        LONG,
    ),
    Scenario("partition-10", "partition into two halves for 10 s", part(10)),
    Scenario("partition-30", "partition into two halves for 30 s", part(30), LONG),
    Scenario(
        "storm", "50 ms delay, 10 % of the chunks stalled for 1 s, random connection resets", storm
    ),
    Scenario("narrow", "a node behind a 1 Mbit/s link", narrow),
    Scenario("slow", "a node with half the speed", slow),
    Scenario("clocks", "wall clocks up to 7 hours apart", nothing, prepare=shift_clocks),
    Scenario(
        "liar-median",
        'a neighbour that lies, `topology.weights = "median"`, complete graph',
        nothing,
        CROWD,
        lie,
        LIAR,
    ),
    Scenario(
        "liar-mean",
        "the same with the plain mean, for comparison",
        nothing,
        CROWD_MEAN,
        lie,
        LIAR,
        judged=False,
    ),
]
