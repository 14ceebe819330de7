"""A whole network of real peers on this machine, with one live table."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedspd.cli.running import new_folder
from fedspd.config import ExperimentConfig, as_dict, load, split_arguments, validate
from fedspd.node.host import local_network as network
from fedspd.node.host.local_network import Listener, NodeProcess


def up(settings: list[str], nodes: int | None, out: Path | None, as_json: bool) -> None:
    folder = out or new_folder("up")
    config = _network(settings, nodes, folder)
    console = Console(stderr=True, markup=False)
    console.print(f"{config.clients} peers, in '{folder}'", highlight=False)
    try:
        with _shown(console, config.rounds, as_json) as listener:
            found = network.up(folder, config, listener)
    except KeyboardInterrupt:
        print(
            f"\nfedspd: Continue with: fedspd up --out {shlex.quote(str(folder))}", file=sys.stderr
        )
        raise
    if as_json:
        print(json.dumps({**found, "folder": str(folder)}))
    elif found["accuracy"] is not None:
        print(
            f"accuracy {100 * found['accuracy']:.1f} % on average; every node's journal and model: {folder}/nodes/NAME/state"
        )


def _network(settings: list[str], nodes: int | None, folder: Path) -> ExperimentConfig:
    """Return the config of a new network, or of the one in the folder."""
    config = load(*split_arguments(settings))
    if nodes is not None:
        config = validate({**as_dict(config), "clients": nodes})
    if not (folder / "network.json").exists():
        network.create(config, folder)
        return config
    stored = network.read_config(folder)
    if settings or nodes is not None:
        network.check_same_config(config, stored, folder)
    return stored


@contextmanager
def _shown(console: Console, rounds: int, as_json: bool) -> Iterator[Listener]:
    """A live table on a terminal, a few lines elsewhere."""
    if not console.is_terminal or as_json:
        yield Lines(console, rounds).show
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda nodes: live.update(table(nodes, rounds), refresh=True)


def table(nodes: Sequence[NodeProcess], rounds: int) -> Table:
    shown = Table("node", "state", "round", "received", "missing", "mixture", "accuracy")
    for node in nodes:
        last = node.last
        mixture = " ".join(f"{share:.2f}" for share in last.get("mixture") or ())
        score = "" if last.get("accuracy") is None else f"{100 * last['accuracy']:.1f} %"
        done = "final" if node.is_done else f"{last.get('round', 0)} of {rounds}"
        received, missing = (", ".join(last.get(key, ())) for key in ("received", "missing"))
        shown.add_row(node.name, node.state, done, received, missing, mixture, score)
    return shown


class Lines:
    """About ten lines for a run where there is no terminal, and one for every node that is restarted or fails."""

    def __init__(self, console: Console, rounds: int) -> None:
        self.console, self.rounds, self.told = console, rounds, 0
        self.news: set[str] = set()

    def show(self, nodes: Sequence[NodeProcess]) -> None:
        for node in nodes:
            if node.restarts or node.process.poll():
                self._once(f"{node.name}: {node.state}")
        slowest = min(node.last.get("round", 0) for node in nodes)
        if (tenth := 10 * slowest // (self.rounds + 1)) > self.told:
            self.told = tenth
            done = (
                f"round {slowest} of {self.rounds}" if slowest <= self.rounds else "the final phase"
            )
            self.console.print(f"every node has done {done}", highlight=False)

    def _once(self, line: str) -> None:
        if line not in self.news:
            self.news.add(line)
            self.console.print(line, highlight=False)
