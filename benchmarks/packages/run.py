"""Other simulators on the workload of `fedspd bench`, in turn with fedspd and with plain torch loops: make bench-packages

Each package gets a virtual environment of its own below .venv-packages, with the same torch. What cannot be installed or run is
said with its reason.
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
ENVIRONMENTS = ROOT / ".venv-packages"
TURNS = 3
LIMIT = 3600  # seconds for an installation, or for one turn


class Contestant(NamedTuple):
    name: str
    script: str
    packages: tuple[str, ...] = ()  # none: it runs in the project's own environment
    removed: tuple[str, ...] = ()


CONTESTANTS = (
    Contestant("two plain loops", "plain_loops.py"),
    Contestant("fedspd", "fedspd_fedavg.py"),
    Contestant("Flower", "flower.py", ("flwr[simulation]",)),
    # fluke reads datasets with torchvision, which we do not need, and whose build in the registry is for another torch
    Contestant("fluke", "fluke_fedavg.py", ("fluke-fl",), ("torchvision",)),
)
NOT_RUN = {
    "p2pfl": "its torch learner imports torchvision (seen with p2pfl 0.4.4)",
    "PFLlib": "no package in the registry",
}


class Failed(Exception):
    pass


def main() -> None:
    speeds: dict[str, list[float]] = {contestant.name: [] for contestant in CONTESTANTS}
    versions: dict[str, str] = {}
    reasons = dict(NOT_RUN)
    ready = [contestant for contestant in CONTESTANTS if prepare(contestant, reasons)]
    for turn in range(TURNS):
        for contestant in ready:
            if contestant.name not in reasons:
                measure(contestant, speeds, versions, reasons)
                said = (
                    reasons.get(contestant.name)
                    or f"{speeds[contestant.name][-1]:,.0f} examples per second"
                )
                print(
                    f"turn {turn + 1} of {TURNS}: {contestant.name}: {said}",
                    file=sys.stderr,
                    flush=True,
                )
    Console(width=120).print(table(speeds, versions, reasons))


def prepare(contestant: Contestant, reasons: dict[str, str]) -> bool:
    done = ENVIRONMENTS / contestant.name / ".installed"
    try:
        if contestant.packages and not done.exists():
            print(f"installing {', '.join(contestant.packages)}", file=sys.stderr, flush=True)
            venv.create(done.parent, with_pip=True, clear=True)
            (ENVIRONMENTS / ".gitignore").write_text("*\n")
            call(
                python(contestant),
                "-m",
                "pip",
                "install",
                "--quiet",
                pin("torch"),
                *contestant.packages,
            )
            if contestant.removed:
                call(
                    python(contestant),
                    "-m",
                    "pip",
                    "uninstall",
                    "--quiet",
                    "--yes",
                    *contestant.removed,
                )
            done.touch()
    except Failed as failure:
        reasons[contestant.name] = f"cannot be installed: {failure}"
        return False
    return True


def pin(package: str) -> str:
    """Of the project's pins this one alone: the packages have their own ideas of the others."""
    (line,) = re.findall(rf"^{package}==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(line)


def python(contestant: Contestant) -> str:
    return (
        str(ENVIRONMENTS / contestant.name / "bin/python")
        if contestant.packages
        else sys.executable
    )


def measure(
    contestant: Contestant,
    speeds: dict[str, list[float]],
    versions: dict[str, str],
    reasons: dict[str, str],
) -> None:
    try:
        said = last_json(call(python(contestant), str(Path(__file__).with_name(contestant.script))))
        speeds[contestant.name].append(said["examples"] / said["seconds"])
        versions[contestant.name] = said["version"]
    except Failed as failure:
        reasons[contestant.name] = f"cannot be run: {failure}"


def call(*command: str) -> str:
    quiet = {
        "PYTHONPATH": str(ROOT / "src"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env={**os.environ, **quiet}
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"took more than {LIMIT} s") from None
    if done.returncode:
        raise Failed(
            (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
        )
    return done.stdout


def last_json(printed: str) -> dict[str, Any]:
    lines = [line for line in printed.splitlines() if line.startswith('{"peer"')]
    if not lines:
        raise Failed("printed no result")
    return dict(json.loads(lines[-1]))


def table(
    speeds: dict[str, list[float]], versions: dict[str, str], reasons: dict[str, str]
) -> Table:
    medians = {
        name: median(found) for name, found in speeds.items() if found and name not in reasons
    }
    shown = Table(
        "", "version", title=f"Examples per second, medians of {TURNS} turns", title_justify="left"
    )
    for column in (
        "examples per second",
        "single turns",
        "over two plain loops",
        "fedspd is faster by",
    ):
        shown.add_column(column, justify="right")
    for name, speed in medians.items():
        spread = f"{min(speeds[name]):,.0f} to {max(speeds[name]):,.0f}"
        ratios = [
            medians.get("two plain loops", 0) and speed / medians["two plain loops"],
            medians.get("fedspd", 0) / speed,
        ]
        shown.add_row(
            name, versions[name], f"{speed:,.0f}", spread, *(f"{ratio:.2f}" for ratio in ratios)
        )
    for name, reason in reasons.items():
        shown.add_row(name, "", reason)
    return shown


if __name__ == "__main__":
    main()
