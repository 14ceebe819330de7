"""The commands compare, sweep, demo, advise and report."""

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import resources
from pathlib import Path

from fedspd.cli.running import new_folder
from fedspd.cli.tables import (
    comparison_table,
    explain_intervals,
    fits_console,
    wide_console,
)
from fedspd.comparison import advice
from fedspd.comparison.jobs import Job, choose_jobs, choose_methods, list_jobs, parse_grid
from fedspd.comparison.progress import ComparisonProgress
from fedspd.comparison.scheduler import run_all
from fedspd.config import check_used, load, split_arguments
from fedspd.core.errors import ConfigError, WorkerError
from fedspd.reporting import pages
from fedspd.reporting.method_rows import Comparison
from fedspd.reporting.runs import is_comparison

DEMO_SEEDS = 5


def compare(
    settings: list[str],
    methods: str | None,
    seeds: int,
    out: Path | None,
    workers: int,
    as_json: bool,
    *,
    is_sweep: bool = False,
) -> None:
    """Run the methods with all seeds, at every grid point; write and show the report."""
    path, words = split_arguments(settings)
    overrides, grid = parse_grid(words) if is_sweep else (words, {})
    if is_sweep and not grid:
        raise ConfigError(
            "No key has several values; expected at least one, such as topology.degree=2,4,6. "
            "Without a grid, use 'fedspd compare'."
        )
    base = load(path, overrides)
    name = "sweep" if is_sweep else "compare"
    folder = out or new_folder(f"{name}-{Path(base.data.name).stem}")
    _run(choose_jobs(base, methods, seeds, grid), folder, workers, base.method, as_json)


def demo(out: Path | None, workers: int, as_json: bool) -> None:
    """Compare the recommended methods on two populations of clients that label differently."""
    with resources.as_file(resources.files("fedspd.cli") / "demo.toml") as path:
        base = load(path)
    jobs = choose_jobs(base, None, DEMO_SEEDS)
    _run(jobs, out or new_folder("demo"), workers, base.method, as_json)


def advise(settings: list[str], workers: int, as_json: bool) -> None:
    """Train a few methods for a few rounds, and say which one fits the data."""
    path, overrides = split_arguments(settings)
    base = advice.shorten(load(path, overrides))
    check_used(base, advice.NEEDED)
    jobs = list_jobs(base, advice.NEEDED, 1, choose_methods(None, base)[1])
    with (
        tempfile.TemporaryDirectory(prefix="fedspd-") as temporary,
        ComparisonProgress(jobs, as_json) as progress,
    ):
        run_all(jobs, Path(temporary) / "runs", workers, [progress])
        comparison = pages.read_comparison([Path(temporary) / "runs"], advice.SPLIT)
    given = advice.advise(comparison.runs, advice.training_labels(base))
    assert given is not None
    print(given.sentence, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps({"rounds": base.rounds, **asdict(given)}))


def report(runs: Sequence[Path], out: Path | None, target: float | None, as_json: bool) -> None:
    """Write and show the report of finished runs."""
    single = runs[0] if len(runs) == 1 and is_comparison(runs[0]) else None
    folder = out or single or Path("report")
    comparison = pages.write_report(runs, folder, load().method, target)
    _show(comparison, folder, as_json)


def _run(jobs: list[Job], folder: Path, workers: int, reference: str, as_json: bool) -> None:
    with _continue_hint(folder):
        with ComparisonProgress(jobs, as_json) as progress:
            run_all(jobs, folder, workers, [progress], reference)
        comparison = pages.read_comparison([folder], reference)
        given = advice.advise(comparison.runs, advice.training_labels(jobs[0].config))
        pages.write_pages(comparison, folder, given.sentence if given else None)
    _show(comparison, folder, as_json, given)


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


def _show(
    comparison: Comparison, folder: Path, as_json: bool, given: advice.Advice | None = None
) -> None:
    for note in comparison.notes:
        print(f"fedspd: {note}", file=sys.stderr)
    console = wide_console(is_stderr=as_json)
    console.print(comparison_table(comparison, partial(fits_console, console)))
    if words := explain_intervals(comparison):
        console.print(words, markup=False, highlight=False, soft_wrap=True)
    for alarm in comparison.alarms:
        console.print(alarm, style="yellow", markup=False)
    if given:
        console.print(f"Advice: {given.sentence}", markup=False, highlight=False, soft_wrap=True)
    page = folder / "report.html"
    console.print(f"Report: {page}", markup=False, soft_wrap=True)
    if as_json:
        document = pages.to_json(comparison)
        for row in document["rows"]:
            del row["curve"], row["clients"]
        document["advice"] = asdict(given) if given else None
        print(json.dumps({"folder": str(folder), "report": str(page), **document}))
