"""`python -m chaos`: run every scenario on eight real peers.

It writes docs/chaos.json and the table of docs/reliability.md; then attacks.py writes its own.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chaos import attacks, table
from chaos.digits import write_digits
from chaos.faults import SCENARIOS, Scenario, Setup, inject_nothing
from chaos.fleet import Fleet, Json
from chaos.hosts import NamespaceNetwork, missing_requirement
from chaos.measures import judge, summarise
from chaos.relay import Relay
from fedspd.config import ExperimentConfig, set_key, validate

NODES = 8
DOCS = Path(__file__).parents[2] / "docs"


def build_config(
    folder: Path, settings: Json, nodes: int = NODES, rounds: int = 30
) -> ExperimentConfig:
    """Return a config for digits on a ring whose nodes have two neighbours on either side."""
    data, edges = folder / "digits.npz", folder / "edges.txt"
    if not data.exists():
        write_digits(data)
        edges.write_text(_ring_with_chords(nodes))
    tree: Json = {
        "clients": nodes,
        "rounds": rounds,
        "data": {"name": str(data), "examples": 500, "test_examples": 390},
        "topology": {"kind": "file", "file": str(edges)},
        "model": {"name": "mlp", "hidden": 128},
        "training": {"lr": 0.1, "batch": 20, "epochs": 10, "decay": 0.9},
        "method": "fedspd",
        "fedspd": {"warmup": 5},
    }
    for key, value in settings.items():
        set_key(tree, key, value)
    return validate(tree)


def _ring_with_chords(nodes: int) -> str:
    """Return the edges to the next node and the one after, each edge once."""
    edges = {frozenset((i, (i + step) % nodes)) for i in range(nodes) for step in (1, 2)}
    return "".join(f"{min(edge)} {max(edge)}\n" for edge in sorted(edges, key=sorted))


def play(scenario: Scenario, config: ExperimentConfig, folder: Path) -> Json:
    """Run one scenario and return its results."""
    with NamespaceNetwork(config.clients) as network, Relay(network.hosts) as relay:
        fleet = Fleet(config, folder, network.hosts)
        scenario.prepare(fleet)
        with fleet:
            faults = scenario.script(Setup(fleet, network, relay))
            fleet.wait_for_end()
        return summarise(fleet, relay.bytes, relay.resets, faults, scenario.byzantine)


def run(scenarios: Sequence[Scenario], folder: Path) -> list[Json]:
    """Run the scenarios, each compared with an undisturbed run of the same config."""
    rows: list[Json] = []
    undisturbed: dict[str, Json] = {}
    for scenario in scenarios:
        config = build_config(folder, scenario.settings)
        key = json.dumps([scenario.settings, scenario.byzantine], sort_keys=True)
        if key not in undisturbed:
            undisturbed[key] = _play_undisturbed(scenario, config, folder / f"calm-{len(rows)}")
        found = _print(scenario.name, play(scenario, config, folder / scenario.name))
        found["problems"] = judge(found, undisturbed[key], scenario.is_judged)
        about = {"name": scenario.name, "title": scenario.title, "rounds": config.rounds}
        rows.append({**about, **found, "undisturbed": undisturbed[key]})
    return rows


def _play_undisturbed(scenario: Scenario, config: ExperimentConfig, folder: Path) -> Json:
    calm = Scenario("calm", "nothing", inject_nothing, byzantine=scenario.byzantine)
    return _print("undisturbed", play(calm, config, folder))


def _print(name: str, found: Json) -> Json:
    print(time.strftime("%H:%M:%S"), name, json.dumps(found), flush=True)
    return found


def _write(rows: Sequence[Json]) -> None:
    """Write the rows, and those that are known of other scenarios."""
    path = DOCS / "chaos.json"
    known = json.loads(path.read_text()) if path.exists() else []
    found = {row["name"]: row for row in (*known, *rows)}
    kept = [found[scenario.name] for scenario in SCENARIOS if scenario.name in found]
    path.write_text(json.dumps(kept, indent=1) + "\n")
    table.insert(DOCS / "reliability.md", kept)


def main() -> int:
    """Run all scenarios, or some; return 1 if a network did not survive one."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--only", help="measure these scenarios again, separated by commas")
    only = parser.parse_args().only
    if problem := missing_requirement():
        print(f"chaos: network namespaces are not available: {problem}", file=sys.stderr)
        return 2
    chosen = [scenario for scenario in SCENARIOS if not only or scenario.name in only.split(",")]
    with tempfile.TemporaryDirectory(prefix="fedspd-chaos-") as folder:
        rows = run(chosen, Path(folder))
    _write(rows)
    if not only:
        attacks.write()
    problems = [f"{row['name']}: {problem}" for row in rows for problem in row["problems"]]
    print("\n".join(problems) or "the network survived every fault")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
