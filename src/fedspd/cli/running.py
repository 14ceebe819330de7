"""The command run."""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedspd.config import ExperimentConfig, check_used, load, parse_override, split_arguments
from fedspd.core.errors import ConfigError, WorkerError
from fedspd.experiment import runner
from fedspd.experiment.build import build_experiment, privacy_note
from fedspd.experiment.callbacks import Callback
from fedspd.experiment.estimate import estimate
from fedspd.experiment.progress import RunProgress
from fedspd.experiment.spending import silent_clients
from fedspd.experiment.trackers import TensorBoard
from fedspd.storage.atomic import Json
from fedspd.storage.run_folder import RunFolder

DIVERGED = 3  # exit code


def run(
    settings: list[str],
    out: Path | None,
    resume: Path | None,
    workers: int | None,
    engine: str,
    address: str | None,
    tensorboard: bool,
    as_json: bool,
) -> int:
    """Run an experiment or continue one, draw its figures, show its summary; return the code."""
    config = _resumed_config(resume, settings, out) if resume else load(*split_arguments(settings))
    name = f"{config.method}-{Path(config.data.name).stem}".replace(":", ".") if config else "run"
    folder = resume or out or new_folder(name)
    hint = _continue_hint(folder, f"run --resume {shlex.quote(str(folder))}")
    with hint, RunProgress(as_json) as progress:
        callbacks: list[Callback] = [progress]
        if tensorboard:
            callbacks.append(TensorBoard(folder / "tensorboard"))
        result = runner.run(
            config,
            out=folder,
            resume=resume is not None,
            workers=workers,
            engine=engine,
            address=address,
            callbacks=callbacks,
            progress=False,  # it is among the callbacks
        )
        _draw([folder], folder / "figures")
    _show(result.summary, folder, as_json)
    lost = [loss is None for loss in result.summary["clients"]["test_loss"]]
    if any(lost):
        print(
            f"fedspd: The run diverged: {sum(lost)} of {len(lost)} clients end with a loss that is "
            "not finite. The records are complete; the alarm says what to try.",
            file=sys.stderr,
        )
    return DIVERGED if any(lost) else 0


def _resumed_config(folder: Path, settings: list[str], out: Path | None) -> ExperimentConfig | None:
    """Return the config of a run that gets more rounds; None: the run goes on as it began."""
    path, overrides = split_arguments(settings)
    if path or out or {parse_override(word)[0] for word in overrides} - {"rounds", "patience"}:
        raise ConfigError(
            f"--resume {folder}: a run continues with its own config and folder. "
            "Leave out CONFIG, --out and KEY=VALUE, except rounds=NUMBER to continue with more."
        )
    if not overrides:
        return None
    stored = load(RunFolder.open(folder).folder / "config.toml")
    wanted = load(folder / "config.toml", overrides)
    if wanted.rounds <= stored.rounds:
        raise ConfigError(
            f"rounds = {wanted.rounds}: not more than the run has; expected above {stored.rounds}."
        )
    return wanted


def export(run: Path, client: int, to: Path) -> None:
    """Write a client's model of a finished run to a file."""
    from fedspd.comparison.notebook import open_folder
    from fedspd.experiment.export import check_target, save_model
    from fedspd.experiment.result import Result

    check_target(to)
    result = open_folder(run)
    if not isinstance(result, Result):
        raise ConfigError(f"'{run}': a comparison; expected the folder of one of its runs.")
    federation, dtype = result.experiment.federation, result.experiment.plan.learner.dtype
    save_model(result.model(client), federation.shape, dtype, to, federation.scale(client))
    if note := privacy_note(result.experiment.config, client in silent_clients(result.folder)):
        print(note, file=sys.stderr)
    print(f"Model of client {client}: {to}")


def dry_run(settings: list[str], resume: Path | None, workers: int, as_json: bool) -> None:
    """Estimate the cost of a run and show it."""
    if resume is not None:
        raise ConfigError(
            f"--resume {resume}: a run that has begun is not estimated. "
            "Leave out --resume and give its config, or leave out --dry-run."
        )
    config = load(*split_arguments(settings))
    check_used(config, [config.method])
    cost = estimate(build_experiment(config), workers)
    if as_json:
        print(json.dumps(cost))
        return
    table = Table("", "estimate", title="Cost of the run", title_justify="left")
    table.add_row("clients, rounds", f"{cost['clients']:,}, {cost['rounds']:,}")
    table.add_row("parameters of a model", f"{cost['parameters']:,}")
    for part, count in cost["memory"].items():
        table.add_row(f"memory: {part}", f"{count / 1e6:,.0f} MB")
    for kind, count in cost["bytes"].items():
        table.add_row(f"sent, {kind.replace('_', ' ')}", f"{count / 1e6:,.1f} MB")
    table.add_row("gradient steps", f"{cost['steps']:,}")
    table.add_row(f"time with {workers} workers", f"{cost['seconds']:,.0f} s")
    Console().print(table, f"From {cost['from']}.")


def new_folder(name: str) -> Path:
    """Return runs/NAME-NUMBER with the next free number."""
    endings = [path.name.rpartition("-")[2] for path in Path("runs").glob(f"{name}-*")]
    numbers = [int(ending) for ending in endings if ending.isdigit()]
    return Path("runs") / f"{name}-{max(numbers, default=0) + 1}"


@contextmanager
def _continue_hint(folder: Path, command: str) -> Iterator[None]:
    """Print the command that continues an interrupted run."""
    try:
        yield
    except (KeyboardInterrupt, WorkerError):
        if (folder / "run.json").exists():
            print(f"\nfedspd: Continue with: fedspd {command}", file=sys.stderr)
        raise


def _draw(runs: list[Path], folder: Path) -> None:
    # Imported here: matplotlib takes as long as torch, and a run need not wait for it.
    from fedspd.reporting.run_figures import write_figures

    write_figures(runs, folder)


def _show(summary: Json, folder: Path, as_json: bool) -> None:
    from fedspd.cli.tables import (
        describe_clusters,
        describe_distributions,
        describe_newcomers,
        fits_console,
        summary_table,
        wide_console,
    )

    console, method = wide_console(is_stderr=as_json), summary["method"]
    console.print(summary_table({method: summary}, partial(fits_console, console)))
    for alarm in summary["alarms"]:
        console.print(f"{method}: {alarm}", style="yellow", markup=False)
    if summary.get("spectrum"):
        console.print(f"{method}: {describe_clusters(summary)}", markup=False)
    if summary.get("distributions"):
        console.print(f"{method}: {describe_distributions(summary)}", markup=False)
    if summary["newcomers"]:
        line = f"{method}: {describe_newcomers(summary['newcomers'])}"
        console.print(line, markup=False)
    console.print(f"Records and figures: {folder}", markup=False, soft_wrap=True)
    if as_json:
        fields = {key: value for key, value in summary.items() if key != "clients"}
        print(json.dumps({"folder": str(folder), **fields}))
