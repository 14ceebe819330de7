"""The commands compare, sweep and report."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fedspd.algorithms import METHODS
from fedspd.cli.progress import ComparisonProgress
from fedspd.cli.running import new_folder
from fedspd.cli.tables import comparison_table, fits_console, wide_console
from fedspd.comparison.jobs import Job, list_jobs, parse_grid
from fedspd.comparison.scheduler import run_all
from fedspd.config import load, split_arguments
from fedspd.core.errors import ConfigError, WorkerError
from fedspd.reporting import pages
from fedspd.reporting.method_rows import Comparison
from fedspd.reporting.runs import is_comparison


def compare(
    settings: list[str],
    methods: str | None,
    seeds: int,
    out: Path | None,
    workers: int,
    as_json: bool,
) -> None:
    """Run the methods with all seeds, and write and show the report."""
    base = load(*split_arguments(settings))
    folder = out or new_folder(f"compare-{Path(base.data.name).stem}")
    jobs = list_jobs(base, _split_methods(methods), seeds)
    _run(jobs, folder, workers, base.method, as_json)


def sweep(
    settings: list[str],
    methods: str | None,
    seeds: int,
    out: Path | None,
    workers: int,
    as_json: bool,
) -> None:
    """Run the methods with all seeds at every grid point, and write and show the report."""
    path, words = split_arguments(settings)
    overrides, grid = parse_grid(words)
    if not grid:
        raise ConfigError(
            "No key has several values; expected at least one, such as topology.degree=2,4,6. "
            "Without a grid, use 'fedspd compare'."
        )
    base = load(path, overrides)
    folder = out or new_folder(f"sweep-{Path(base.data.name).stem}")
    jobs = list_jobs(base, _split_methods(methods), seeds, grid)
    _run(jobs, folder, workers, base.method, as_json)


def report(runs: Sequence[Path], out: Path | None, as_json: bool) -> None:
    """Write and show the report of finished runs."""
    single = runs[0] if len(runs) == 1 and is_comparison(runs[0]) else None
    folder = out or single or Path("report")
    comparison = pages.write_report(runs, folder, load().method)
    _show(comparison, folder, as_json)


def _split_methods(methods: str | None) -> list[str]:
    if methods is None:
        return list(METHODS)
    return [name.strip() for name in methods.split(",") if name.strip()]


def _run(jobs: list[Job], folder: Path, workers: int, reference: str, as_json: bool) -> None:
    with _continue_hint(folder), ComparisonProgress(jobs, as_json) as progress:
        run_all(jobs, folder, workers, [progress], reference)
    _show(pages.write_report([folder], folder, reference), folder, as_json)


@contextmanager
def _continue_hint(folder: Path) -> Iterator[None]:
    """Print the command that continues an interrupted comparison."""
    try:
        yield
    except (KeyboardInterrupt, WorkerError):
        if is_comparison(folder):
            words = ["fedspd", *sys.argv[1:]]
            if not any(word == "--out" or word.startswith("--out=") for word in words):
                words += ["--out", str(folder)]
            print(f"\nfedspd: Continue with: {shlex.join(words)}", file=sys.stderr)
        raise


def _show(comparison: Comparison, folder: Path, as_json: bool) -> None:
    for note in comparison.notes:
        print(f"fedspd: {note}", file=sys.stderr)
    console = wide_console(is_stderr=as_json)
    console.print(comparison_table(comparison, partial(fits_console, console)))
    for alarm in comparison.alarms:
        console.print(alarm, style="yellow", markup=False)
    page = folder / "report.html"
    console.print(f"Report: {page}", markup=False, soft_wrap=True)
    if as_json:
        document = pages.to_json(comparison)
        for row in document["rows"]:
            del row["curve"], row["clients"]
        print(json.dumps({"folder": str(folder), "report": str(page), **document}))
