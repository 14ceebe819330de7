"""The command privacy: what a run will spend, or has spent."""

import json
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedspd.config import ExperimentConfig, load, method_class, split_arguments, validate
from fedspd.core.errors import ConfigError
from fedspd.core.machine import file_exists
from fedspd.experiment.build import build_budget
from fedspd.experiment.spending import silence_alarm
from fedspd.node.peer.privacy import read_ledger, report_of
from fedspd.privacy.budget import Budget, describe, warnings
from fedspd.privacy.ledger import RunLedger
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import LEDGER, RunFolder

ROWS = 12  # of the table of rounds
BAR_LETTERS = 40


def show(settings: list[str], as_json: bool) -> None:
    """Show the budget of a config, or the ledger of a run folder or of a node's journal."""
    folder = _find_folder(Path(settings[0])) if settings else None
    if folder is not None:
        _check_alone(settings)
        about = _spent(folder)
    else:
        about = _planned(load(*split_arguments(settings)))
    if as_json:
        print(json.dumps(about))
        return
    console = Console()
    for sentence in about["sentences"]:
        console.print(sentence, markup=False, highlight=False)
    if about["rounds"]:
        console.print(_curve(about["rounds"]))
    if about["neighbours"]:
        console.print(_neighbours(about))


def _find_folder(path: Path) -> Path | None:
    """Return the folder of a run or of a node's journal, which may be in its bundle; None: none."""
    for folder in (path, path / "state"):
        if file_exists(folder / "run.json"):
            return folder
    is_missing = "=" not in path.name and not file_exists(path)
    if is_missing or path.is_dir():
        problem = "no such file or folder" if is_missing else "neither a run nor a node"
        raise ConfigError(
            f"'{path}': {problem}; expected a folder with run.json, a node's bundle or a TOML file."
        )
    return None


def _check_alone(settings: list[str]) -> None:
    if len(settings) > 1:
        raise ConfigError(
            f"{settings[1]}: not with a run or a node, whose config is known; expected the folder "
            f"'{settings[0]}' alone. Leave it out."
        )


def _planned(config: ExperimentConfig) -> Json:
    """Return what a run of the config will spend, if nothing fails."""
    budget = _budget(config)
    sends_models = "exchange" not in method_class(config).UNUSED_KEYS
    rounds = [[t, budget.epsilon_after(t)] for t in range(1, config.rounds + 1)]
    return {
        "sentences": [
            *describe(budget),
            *warnings(config.privacy, config.data.examples or 1, sends_models),
            "A neighbour that received a model in round t is at the epsilon of round t, whatever "
            "it received before; all neighbours together are at that of the last round. So is what "
            "reaches a neighbour through others.",
        ],
        "delta": config.privacy.delta,
        "rounds": rounds,
        "all": [rounds[-1][1]],
        "neighbours": [],
    }


def _budget(config: ExperimentConfig) -> Budget:
    budget = build_budget(config)
    if budget is None:
        raise ConfigError(
            "privacy.epsilon: not given, and neither is privacy.noise, so nothing is private; "
            "expected one of them. Add privacy.epsilon=8, for example."
        )
    return budget


def _spent(folder: Path) -> Json:
    run_folder = RunFolder.open(folder)
    if (folder / LEDGER).exists():
        return _spent_by_node(run_folder)
    stored = run_folder.read("run.json")
    if "node" in stored:
        raise ConfigError(
            f"'{folder}': this node has no ledger: it has not begun, or is not private; expected "
            f"{LEDGER}. Wait until its first round, or give the network privacy.epsilon."
        )
    config = validate(stored["config"])
    if not config.privacy.is_on:
        raise ConfigError(
            f"'{folder}': this run is not private; expected one whose config has privacy.epsilon "
            "or privacy.noise. Start a new run with one of them."
        )
    ledger, rounds = RunLedger(config.clients, config.privacy.delta), []
    for event in run_folder.events():
        if "privacy" in event:
            ledger.record(event["privacy"])
        if "privacy" in event and event["event"] == "round":
            rounds.append([event["round"], max(event["privacy"]["epsilon"])])
    found = ledger.as_json()
    sentence = (
        f"Privacy: epsilon = {max(found['all']):.4g} after {len(rounds)} of {config.rounds} "
        f"rounds, at delta = {config.privacy.delta:g}: the most of a client against all others "
        "together."
    )
    sentences = [sentence, *silence_alarm(ledger.silent)]
    return {"sentences": sentences, "rounds": rounds, **found}


def _spent_by_node(run_folder: RunFolder) -> Json:
    """Return what a node has spent, from the ledger in its journal."""
    reported = [event for event in run_folder.events() if "privacy" in event]
    found = report_of(read_ledger(run_folder), None)
    spent, delta = found["epsilon"], found["delta"]
    silent = " Its budget is spent: it sends nothing more." if found["silent"] else ""
    return {
        "sentences": [
            f"Privacy: epsilon = {spent:.4g} at delta = {delta:g}, against all neighbours together."
            + silent
        ],
        "delta": delta,
        "rounds": [[event["round"], event["privacy"]["epsilon"]] for event in reported],
        "all": [spent],
        "neighbours": [["this node", name, cost] for name, cost in found["neighbours"].items()],
    }


def _curve(rounds: list[list[float]]) -> Table:
    """Return epsilon by round, as numbers and as bars."""
    table = Table("round", "epsilon", "", title="Budget by round", title_justify="left")
    most = max((cost for _, cost in rounds), default=0.0) or 1.0
    cuts = sorted({round(len(rounds) * row / ROWS) for row in range(ROWS + 1)})
    for _, cut in pairwise(cuts):
        t, cost = rounds[cut - 1]
        table.add_row(str(int(t)), f"{cost:.4g}", "█" * round(BAR_LETTERS * cost / most))
    return table


def _neighbours(about: Json) -> Table:
    """Return the epsilon of clients against each neighbour, the largest first."""
    table = Table("of", "against", "epsilon", title="Per neighbour", title_justify="left")
    pairs = sorted(about["neighbours"], key=lambda row: -row[2])
    for sender, receiver, cost in pairs[:ROWS]:
        table.add_row(str(sender), "server" if receiver == -1 else str(receiver), f"{cost:.4g}")
    if len(pairs) > ROWS:
        table.caption = f"{len(pairs) - ROWS} more with --json, all of them lower or equal"
    return table
