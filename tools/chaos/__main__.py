"""`python -m chaos`: every fault on eight real peers, to docs/chaos.json and the table of docs/reliability.md."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chaos import digits, table
from chaos.faults import SCENARIOS, Scenario, Stage, nothing
from chaos.fleet import Fleet, Json
from chaos.hosts import Hosts, why_not
from chaos.measures import measured, verdict
from chaos.relay import Relay
from fedspd.config import ExperimentConfig, set_key, validate

NODES = 8
DOCS = Path(__file__).parents[2] / "docs"


def config(folder: Path, settings: Json, nodes: int = NODES, rounds: int = 30) -> ExperimentConfig:
    """Digits on a ring with chords: everybody hears the two next on either side."""
    data, edges = folder / "digits.npz", folder / "edges.txt"
    if not data.exists():
        digits.write(data)
        edges.write_text(
            "".join(
                f"{i} {(i + step) % nodes}\n"
                for i in range(nodes)
                for step in (1, 2)
                if 2 * step < nodes or i < step
            )
        )
    tree: Json = {
        "clients": nodes,
        "rounds": rounds,
        "data": {"name": str(data), "examples": 500, "test_examples": 390},
        "topology": {"kind": "file", "file": str(edges)},
        "model": {"name": "mlp", "hidden": 128},
        "training": {"lr": 0.1, "batch": 20, "epochs": 10, "decay": 0.9},
        "fedspd": {"warmup": 5},
    }
    for key, value in settings.items():
        set_key(tree, key, value)
    return validate(tree)


def play(scenario: Scenario, config: ExperimentConfig, folder: Path) -> Json:
    with Hosts(config.clients) as hosts, Relay(hosts.machines) as relay:
        fleet = Fleet(config, folder, hosts.machines)
        scenario.prepare(fleet)
        with fleet:
            faults = scenario.story(Stage(fleet, hosts, relay))
            fleet.wait()
        return measured(fleet, relay.bytes, relay.resets, faults, scenario.liar)


def run(scenarios: Sequence[Scenario], folder: Path) -> list[Json]:
    """Each against the undisturbed run of the same config."""
    rows: list[Json] = []
    undisturbed: dict[str, Json] = {}
    for scenario in scenarios:
        settings = config(folder, scenario.settings)
        kind = json.dumps([scenario.settings, scenario.liar], sort_keys=True)
        if kind not in undisturbed:
            calm = Scenario("calm", "nothing", nothing, scenario.settings, liar=scenario.liar)
            undisturbed[kind] = _told(
                "undisturbed", play(calm, settings, folder / f"calm-{len(undisturbed)}")
            )
        found = _told(scenario.name, play(scenario, settings, folder / scenario.name))
        found["problems"] = verdict(found, undisturbed[kind], scenario.judged)
        rows.append(
            {
                "name": scenario.name,
                "title": scenario.title,
                "rounds": settings.rounds,
                **found,
                "undisturbed": undisturbed[kind],
            }
        )
    return rows


def _told(name: str, found: Json) -> Json:
    print(time.strftime("%H:%M:%S"), name, json.dumps(found), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument(
        "--only", help="names of scenarios, with commas between them; writes no document"
    )
    only = parser.parse_args().only
    if reason := why_not():
        print(f"chaos: network namespaces cannot be had here: {reason}", file=sys.stderr)
        return 2
    chosen = [scenario for scenario in SCENARIOS if not only or scenario.name in only.split(",")]
    with tempfile.TemporaryDirectory(prefix="fedspd-chaos-") as folder:
        rows = run(chosen, Path(folder))
    if not only:
        (DOCS / "chaos.json").write_text(json.dumps(rows, indent=1) + "\n")
        table.insert(DOCS / "reliability.md", rows)
    problems = [f"{row['name']}: {problem}" for row in rows for problem in row["problems"]]
    print("\n".join(problems) or "every fault was survived")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
