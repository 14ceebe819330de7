"""The scenarios: faults that are injected while a network trains.

The script of a scenario injects its faults, and returns when each was detected and recovered.
"""

import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from chaos.fleet import Fleet, Json
from chaos.hosts import NamespaceNetwork
from chaos.relay import LinkConditions, Relay

STUTTER_SECONDS = 0.05  # for which a slow node runs, and then stands still
HOUR_SECONDS = 3600
BYZANTINE = "node-2"
SOURCE = Path(__file__).parent


class Fault(NamedTuple):
    """One fault; times are seconds of this process's clock."""

    what: str
    began: float
    noticed: float | None  # the first round that a neighbour committed without the victim
    mended: float  # the restart, or the return of the link
    healed: float  # every neighbour has received from the victim again
    rounds: int  # of the victim after the fault was mended, until it was healed
    restarted: bool


class Setup(NamedTuple):
    """The running network into which a script injects faults."""

    fleet: Fleet
    network: NamespaceNetwork
    relay: Relay


Script = Callable[[Setup], list[Fault]]


@dataclass(frozen=True)
class Scenario:
    """A script, the config of its network, and how the result is judged."""

    name: str
    title: str
    script: Script
    settings: Json = field(default_factory=dict)  # override the common config
    prepare: Callable[[Fleet], None] = lambda fleet: None  # before the nodes start
    byzantine: str | None = None  # the node whose own accuracy is ignored
    is_judged: bool = True  # must end within two points of the undisturbed run


# ---- scripts


def inject_nothing(setup: Setup) -> list[Fault]:
    """Inject no fault while the network runs."""
    return []


def kill_each(setup: Setup) -> list[Fault]:
    """Kill one node after the other, each when all neighbours receive from the last one again."""
    rng, fleet = random.Random(5), setup.fleet
    fleet.wait_until(lambda: fleet.has_reached(2))
    victims = rng.sample(list(fleet.nodes), len(fleet.nodes))
    return [_kill(fleet, name, rng.uniform(0.0, 1.5)) for name in victims]


def _kill(fleet: Fleet, name: str, wait_seconds: float) -> Fault:
    """Kill a node at some moment of a round, and restart it when its neighbours have gone on."""
    fleet.wait_for(wait_seconds)
    began = fleet.kill(name)
    fleet.wait_until(lambda: fleet.first_without(name, began) is not None)
    mended = fleet.restart(name)
    return _wait_for_recovery(fleet, f"SIGKILL {name}", [name], began, mended)


def partition(seconds: float) -> Script:
    """Return a script that separates the two halves of the network for some time."""

    def script(setup: Setup) -> list[Fault]:
        fleet = setup.fleet
        fleet.wait_until(lambda: fleet.has_reached(3))
        setup.network.set_cable("down")
        began = time.monotonic()
        fleet.wait_for(seconds)
        setup.network.set_cable("up")
        mended, what = time.monotonic(), f"partition for {seconds:g} s"
        return [_wait_for_recovery(fleet, what, list(fleet.nodes), began, mended)]

    return script


def disturb_links(setup: Setup) -> list[Fault]:
    """Delay, stall and reset connections."""
    setup.relay.conditions = LinkConditions(delay=0.05, stalled=0.1, reset=0.005)
    return []


def cut_one_way(setup: Setup) -> list[Fault]:
    """Let one node reach a neighbour that does not reach it."""
    caller, _, _ = setup.network.hosts[2].address.rpartition(":")
    setup.relay.conditions = LinkConditions(cut=(caller, setup.network.hosts[3].address))
    return []


def limit_bandwidth(setup: Setup) -> list[Fault]:
    """Put one node behind a slow link."""
    setup.network.limit_rate(3, "1mbit")
    return []


def slow_down(setup: Setup) -> list[Fault]:
    """Stop one node for half of the time."""
    process = setup.fleet.nodes["node-5"].process
    assert process is not None
    threading.Thread(target=_stutter, args=(process,), daemon=True).start()
    return []


def _stutter(process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            process.send_signal(number)
            time.sleep(STUTTER_SECONDS)


def _wait_for_recovery(
    fleet: Fleet, what: str, victims: Sequence[str], began: float, mended: float
) -> Fault:
    """Wait until all neighbours have received from all victims again."""
    fleet.wait_until(lambda: all(_has_recovered(fleet, name, mended) for name in victims))
    received = [seen for name in victims for seen in fleet.first_with(name, mended).values()]
    missed = [seen.at for name in victims if (seen := fleet.first_without(name, began))]
    return Fault(
        what,
        began,
        noticed=min(missed, default=None),
        mended=mended,
        healed=max(seen.at for seen in received),
        rounds=max(rounds_to_recover(fleet, name, mended) for name in victims),
        restarted=len(victims) == 1,
    )


def _has_recovered(fleet: Fleet, name: str, mended: float) -> bool:
    """Return whether all neighbours received from a victim, and it has committed a round itself."""
    is_received = set(fleet.first_with(name, mended)) >= set(fleet.neighbours[name])
    return is_received and bool(fleet.observations_of(name, mended))


def rounds_to_recover(fleet: Fleet, name: str, mended: float) -> int:
    """Count the rounds from a victim's first until its last neighbour received from it.

    The first does not count if the neighbours had ended it when the victim was back.
    """
    first = min(
        (seen.event for seen in fleet.observations_of(name, mended)), key=lambda e: int(e["round"])
    )
    last = max(int(seen.event["round"]) for seen in fleet.first_with(name, mended).values())
    return last - int(first["round"]) + bool(first.get("received"))


# ---- nodes that differ from the start


def load_restarts(fleet: Fleet) -> None:
    """Load the second process of every node before the network starts.

    Loading takes seconds, and much longer on a busy machine. The others would go on meanwhile, and
    have no rounds left when the last node comes back.
    """
    for node in fleet.nodes.values():
        node.prepare_restart()


def run_instead(script: str) -> Callable[[Fleet], None]:
    """Let one node run a script of this folder."""

    def prepare(fleet: Fleet) -> None:
        program = f"import runpy; runpy.run_path({str(SOURCE / script)!r}, run_name='__main__')"
        fleet.nodes[BYZANTINE].program = program

    return prepare


def shift_clocks(fleet: Fleet) -> None:
    """Set the wall clocks of the nodes hours apart, by a library that is preloaded."""
    library, source = fleet.folder / "clock.so", SOURCE / "clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    for i, node in enumerate(fleet.nodes.values()):
        offset = str(HOUR_SECONDS * (i - 4))
        node.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": offset}


# ---- all scenarios

# Long enough that rounds are left when a node, or half of them, returns.
LONG = {"rounds": 240, "training.decay": 0.97}
COMPLETE_MEDIAN = {"topology": {"kind": "complete", "weights": "median"}}
COMPLETE_MEAN = {"topology": {"kind": "complete"}}

SCENARIOS = [
    Scenario(
        "kill", "SIGKILL of each node in turn, then a restart", kill_each, LONG, load_restarts
    ),
    Scenario("partition-10", "partition into two halves for 10 s", partition(10), LONG),
    Scenario("partition-30", "partition into two halves for 30 s", partition(30), LONG),
    Scenario(
        "storm", "50 ms delay, 10 % of chunks stalled for 1 s, connection resets", disturb_links
    ),
    Scenario("narrow", "one node behind a 1 Mbit/s link", limit_bandwidth),
    Scenario("one-way", "one link works in one direction alone", cut_one_way),
    Scenario("slow", "one node at half speed", slow_down),
    Scenario("clocks", "wall clocks up to 7 hours apart", inject_nothing, prepare=shift_clocks),
    Scenario(
        "laggard",
        "one node sends every model at 0.8 of the deadline",
        inject_nothing,
        prepare=run_instead("laggard.py"),
    ),
    Scenario(
        "byzantine-median",
        'one Byzantine node, `topology.weights = "median"`, complete graph',
        inject_nothing,
        COMPLETE_MEDIAN,
        run_instead("byzantine.py"),
        BYZANTINE,
    ),
    Scenario(
        "byzantine-mean",
        "the same with the plain mean, for comparison",
        inject_nothing,
        COMPLETE_MEAN,
        run_instead("byzantine.py"),
        BYZANTINE,
        is_judged=False,
    ),
]
