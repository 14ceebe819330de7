"""The command `fedspd up`: a network of real peers on this machine, with one live table."""

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
from fedspd.config import ExperimentConfig, as_dict, check_used, load, split_arguments, validate
from fedspd.core.machine import file_exists
from fedspd.core.scores import ACCURACY, main_score
from fedspd.node.host import local_network
from fedspd.node.host.local_network import Listener, NodeProcess


def up(settings: list[str], nodes: int | None, out: Path | None, as_json: bool) -> None:
    """Run a new network, or continue the one in the folder."""
    folder = out or new_folder("up")
    config = _open_network(settings, nodes, folder)
    console = Console(stderr=True, markup=False)
    console.print(f"{config.clients} peers in '{folder}'", highlight=False)
    try:
        with _showing_progress(console, config.rounds, as_json) as listener:
            found = local_network.up(folder, config, listener)
    except KeyboardInterrupt:
        command = f"fedspd up --out {shlex.quote(str(folder))}"
        print(f"\nfedspd: Continue with: {command}", file=sys.stderr)
        raise
    if as_json:
        print(json.dumps({**found, "folder": str(folder)}))
    elif found.get((score := main_score(found)).name) is not None:
        mean = f"mean {score.title} {score.text(found[score.name])}{score.unit}"
        print(f"{mean}; journals and models: {folder}/nodes/NAME/state")


def _open_network(settings: list[str], nodes: int | None, folder: Path) -> ExperimentConfig:
    """Return the config of a new network, or of the one in the folder."""
    config = load(*split_arguments(settings))
    check_used(config, [config.method])
    if nodes is not None:
        config = validate({**as_dict(config), "clients": nodes})
    if not file_exists(folder / "network.json"):
        local_network.create(config, folder)
        return config
    stored = local_network.read_config(folder)
    if settings or nodes is not None:
        local_network.check_same_config(config, stored, folder)
    return stored


@contextmanager
def _showing_progress(console: Console, rounds: int, as_json: bool) -> Iterator[Listener]:
    """Show a live table on a terminal, and a few lines elsewhere."""
    if not console.is_terminal or as_json:
        yield ProgressLines(console, rounds).show
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda nodes: live.update(build_table(nodes, rounds), refresh=True)


def build_table(nodes: Sequence[NodeProcess], rounds: int) -> Table:
    """Return a table with a row for every node."""
    tested = next((node.last for node in nodes if "test_loss" in node.last), None)
    score = ACCURACY if tested is None else main_score(tested)
    table = Table("node", "state", "round", "received", "missing", "mixture", score.heading)
    for node in nodes:
        last = node.last
        mixture = " ".join(f"{share:.2f}" for share in last.get("mixture") or ())
        value = last.get(score.name)
        shown = "" if value is None else score.text(value)
        progress = "final" if node.is_done else f"{last.get('round', 0)} of {rounds}"
        received, missing = (", ".join(last.get(key, ())) for key in ("received", "missing"))
        table.add_row(node.name, node.state, progress, received, missing, mixture, shown)
    return table


class ProgressLines:
    """About ten lines for a run, and one for every node that is restarted or fails."""

    def __init__(self, console: Console, rounds: int) -> None:
        self.console, self.rounds = console, rounds
        self.last_reported = 0  # tenths of the run
        self._printed: set[str] = set()

    def show(self, nodes: Sequence[NodeProcess]) -> None:
        """Print what has changed."""
        for node in nodes:
            if node.restarts or node.process.poll():
                self._print_once(f"{node.name}: {node.state}")
        slowest = min(node.last.get("round", 0) for node in nodes)
        if (tenth := 10 * slowest // (self.rounds + 1)) > self.last_reported:
            self.last_reported = tenth
            is_final = slowest > self.rounds
            done = "the final phase" if is_final else f"round {slowest} of {self.rounds}"
            self._print_once(f"every node has finished {done}")

    def _print_once(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            self.console.print(line, highlight=False)
