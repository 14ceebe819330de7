"""Other simulators on two workloads of `fedspd bench`, in turn with fedspd and plain torch loops.

    make bench-packages

Each package has its own virtual environment with the same torch, in the folder that
FEDSPD_PACKAGES names, else ~/.cache/fedspd-packages. The tables give the reason where a package
cannot be installed or run.
"""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
ENVIRONMENTS = Path(os.environ.get("FEDSPD_PACKAGES") or CACHE / "fedspd-packages")
TURNS = 3
TIMEOUT_SECONDS = 3600  # of an installation, or of one turn
WORKLOADS = {  # by name in workload.py
    "cnn": "the paper's MNIST CNN, 20 clients x 300 examples, batch 50",
    "small": "an MLP of 64 features, 200 clients x 72 examples, batch 10",
}


class Contestant(NamedTuple):
    """A simulator and the script that times it.

    packages   to install; none: it runs in the project's environment
    removed    dependencies to uninstall again
    """

    name: str
    script: str
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


CONTESTANTS = (
    Contestant("two plain loops", "plain_loops.py"),
    Contestant("fedspd", "fedspd_fedavg.py"),
    Contestant("Flower", "flower.py", ("flwr[simulation]",)),
    # fluke only needs torchvision to read datasets, and its wheel is built for another torch
    Contestant("fluke", "fluke_fedavg.py", ("fluke-fl",), ("torchvision",)),
)
NOT_RUN = {
    "p2pfl": "its torch learner imports torchvision (seen with p2pfl 0.4.4)",
    "PFLlib": "no package in the registry",
}


class Speed(NamedTuple):
    """Examples per second by the clock, and per processor second of all processes."""

    clock: float
    processor: float

    def __str__(self) -> str:
        return f"{self.clock:,.0f} examples per second, {self.processor:,.0f} per processor second"


class CallError(Exception):
    """A command that failed; the message is the reason."""


def main() -> None:
    reasons = dict(NOT_RUN)
    ready = [contestant for contestant in CONTESTANTS if prepare(contestant, reasons)]
    for workload in sys.argv[1:] or WORKLOADS:
        Console(width=120).print(compare(workload, ready, dict(reasons)))


def compare(workload: str, ready: list[Contestant], reasons: dict[str, str]) -> Table:
    """Return the table of a workload, on which all contestants took turns."""
    speeds: dict[str, list[Speed]] = {contestant.name: [] for contestant in CONTESTANTS}
    versions: dict[str, str] = {}
    for turn in range(1, TURNS + 1):
        for contestant in ready:
            name = contestant.name
            if name not in reasons:
                measure(contestant, workload, speeds, versions, reasons)
                result = reasons.get(name) or str(speeds[name][-1])
                show_progress(f"{workload}, turn {turn} of {TURNS}: {name}: {result}")
    return table(WORKLOADS[workload], speeds, versions, reasons)


def prepare(contestant: Contestant, reasons: dict[str, str]) -> bool:
    """Return whether the contestant is installed; if not, note the reason."""
    done = ENVIRONMENTS / contestant.name / ".installed"
    if not contestant.packages or done.exists():
        return True
    try:
        install(contestant, done.parent)
    except CallError as error:
        reasons[contestant.name] = f"cannot be installed: {error}"
        return False
    done.touch()
    return True


def install(contestant: Contestant, environment: Path) -> None:
    show_progress(f"installing {', '.join(contestant.packages)}")
    venv.create(environment, with_pip=True, clear=True)
    pip = (python(contestant), "-m", "pip")
    call(*pip, "install", "--quiet", pin("torch"), *contestant.packages)
    if contestant.removed:
        call(*pip, "uninstall", "--quiet", "--yes", *contestant.removed)


def show_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def pin(package: str) -> str:
    """Return the project's pin of a package; packages choose all other versions themselves."""
    (line,) = re.findall(rf"^{package}==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(line)


def python(contestant: Contestant) -> str:
    if not contestant.packages:
        return sys.executable
    return str(ENVIRONMENTS / contestant.name / "bin/python")


def measure(
    contestant: Contestant,
    workload: str,
    speeds: dict[str, list[Speed]],
    versions: dict[str, str],
    reasons: dict[str, str],
) -> None:
    """Run one turn and note the speed, or the reason why there is none."""
    script = Path(__file__).with_name(contestant.script)
    try:
        result = last_result(call(python(contestant), str(script), WORKLOAD=workload))
        seconds = result["seconds"], result["processor_seconds"]
        speeds[contestant.name].append(Speed(*(result["examples"] / spent for spent in seconds)))
        versions[contestant.name] = result["version"]
    except CallError as error:
        reasons[contestant.name] = f"cannot be run: {error}"


def call(*command: str, **variables: str) -> str:
    """Return what the command printed, or raise CallError with its last line of stderr."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        **variables,
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        raise CallError(f"took more than {TIMEOUT_SECONDS} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CallError(lines[-1][:200])
    return done.stdout


def last_result(printed: str) -> dict[str, Any]:
    lines = [line for line in printed.splitlines() if line.startswith('{"contestant"')]
    if not lines:
        raise CallError("printed no result")
    return dict(json.loads(lines[-1]))


def table(
    workload: str,
    speeds: dict[str, list[Speed]],
    versions: dict[str, str],
    reasons: dict[str, str],
) -> Table:
    title = f"{workload}: examples per second and per processor second, medians of {TURNS} turns"
    shown = Table("", "version", title=title, title_justify="left")
    for column in ("by the clock", "turns", "fedspd over it", "by processor", "fedspd over it"):
        shown.add_column(column, justify="right")
    medians = {
        name: Speed(*map(median, zip(*turns, strict=True)))
        for name, turns in speeds.items()
        if name not in reasons
    }
    for name, speed in medians.items():
        clock = [turn.clock for turn in speeds[name]]
        own = medians.get("fedspd", Speed(0.0, 0.0))
        shown.add_row(
            *(name, versions[name]),
            *(f"{speed.clock:,.0f}", f"{min(clock):,.0f} to {max(clock):,.0f}"),
            f"{own.clock / speed.clock:.2f}",
            *(f"{speed.processor:,.0f}", f"{own.processor / speed.processor:.2f}"),
        )
    for name, reason in reasons.items():
        shown.add_row(name, "", reason)
    return shown


if __name__ == "__main__":
    main()
