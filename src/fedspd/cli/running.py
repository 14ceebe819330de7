"""What the commands do."""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedspd.algorithms import METHODS
from fedspd.cli.progress import RunProgress
from fedspd.config import METHOD_TABLES, load, split_arguments
from fedspd.core.errors import ConfigError, WorkerError
from fedspd.experiment import runner
from fedspd.experiment.build import build_experiment
from fedspd.experiment.callbacks import Callback, TensorBoard
from fedspd.experiment.estimate import estimate
from fedspd.storage.atomic import Json


def run(
    settings: list[str],
    out: Path | None,
    resume: Path | None,
    workers: int | None,
    engine: str,
    address: str | None,
    tensorboard: bool,
    as_json: bool,
) -> None:
    if resume is not None and (settings or out):
        raise ConfigError(
            "--resume continues a run as it was started: give no config, no values and no --out with it."
        )
    config = None if resume else load(*split_arguments(settings))
    folder = (
        resume
        or out
        or new_folder(
            f"{config.method}-{Path(config.data.name).stem}".replace(":", ".") if config else "run"
        )
    )
    with (
        _resumable(folder, f"run --resume {shlex.quote(str(folder))}"),
        RunProgress(as_json) as progress,
    ):
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
        )
        _draw([folder], folder / "figures")
    _show({result.summary["method"]: result.summary}, folder, as_json)


def dry_run(settings: list[str], workers: int, as_json: bool) -> None:
    found = estimate(build_experiment(load(*split_arguments(settings))), workers)
    if as_json:
        print(json.dumps(found))
        return
    table = Table("", "estimate", title="What the run will cost", title_justify="left")
    table.add_row("clients, rounds", f"{found['clients']:,}, {found['rounds']:,}")
    table.add_row("numbers in a model", f"{found['parameters']:,}")
    for part, count in found["memory"].items():
        table.add_row(f"memory: {part}", f"{count / 1e6:,.0f} MB")
    for kind, count in found["bytes"].items():
        table.add_row(f"sent, {kind.replace('_', ' ')}", f"{count / 1e6:,.1f} MB")
    table.add_row("gradient steps", f"{found['steps']:,}")
    table.add_row(f"time with {workers} workers", f"{found['seconds']:,.0f} s")
    Console().print(table, f"From {found['from']}.")


def demo(out: Path | None, workers: int, as_json: bool) -> None:
    folder = out or new_folder("demo")
    with resources.as_file(resources.files("fedspd.cli") / "demo.toml") as path:
        config = load(path)
    summaries = {}
    for method in ("fedspd", "local"):
        begun = (folder / method / "run.json").exists()
        with (
            _resumable(folder / method, f"demo --out {shlex.quote(str(folder))}"),
            RunProgress(as_json) as progress,
        ):
            result = runner.run(
                runner.with_method(config, method),
                out=folder / method,
                resume=begun,
                workers=workers,
                callbacks=[progress],
            )
        summaries[method] = result.summary
    _draw([folder / method for method in summaries], folder / "figures")
    _show(summaries, folder, as_json)


def methods(as_json: bool) -> None:
    about = {
        name: (sys.modules[cls.__module__].__doc__ or "").splitlines()[0]
        for name, cls in METHODS.items()
    }
    options = {name: table().model_dump(by_alias=True) for name, table in METHOD_TABLES.items()}
    if as_json:
        print(
            json.dumps({name: {"about": about[name], "options": options[name]} for name in METHODS})
        )
        return
    table = Table("method", "what it is", "options", title="Methods")
    for name in METHODS:
        table.add_row(
            name, about[name], ", ".join(f"{key}={value}" for key, value in options[name].items())
        )
    Console().print(table)


def new_folder(name: str) -> Path:
    numbers = (
        int(path.name.rpartition("-")[2])
        for path in Path("runs").glob(f"{name}-*")
        if path.name.rpartition("-")[2].isdigit()
    )
    return Path("runs") / f"{name}-{max(numbers, default=0) + 1}"


@contextmanager
def _resumable(folder: Path, command: str) -> Iterator[None]:
    """Ctrl-C, SIGTERM or a lost worker end the run where it is; what is on disk can be continued."""
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


def _show(summaries: dict[str, Json], folder: Path, as_json: bool) -> None:
    from fedspd.cli.tables import describe_newcomers, summary_table

    console = Console(stderr=as_json)
    console.print(summary_table(summaries))
    for summary in summaries.values():
        for alarm in summary["alarms"]:
            console.print(f"{summary['method']}: {alarm}", style="yellow", markup=False)
        if summary["newcomers"]:
            console.print(f"{summary['method']}: {describe_newcomers(summary['newcomers'])}")
    console.print(f"Records and figures: {folder}", markup=False, soft_wrap=True)
    if as_json:
        methods: dict[str, Any] = {
            name: {k: v for k, v in s.items() if k != "clients"} for name, s in summaries.items()
        }
        print(
            json.dumps(
                {
                    "folder": str(folder),
                    **(next(iter(methods.values())) if len(methods) == 1 else {"methods": methods}),
                }
            )
        )
