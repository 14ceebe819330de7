"""Comparisons from Python: what the commands compare, sweep and report do, as functions."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedspd.comparison.jobs import Job, choose_jobs
from fedspd.comparison.progress import ComparisonProgress
from fedspd.comparison.scheduler import run_all
from fedspd.config import load
from fedspd.core.errors import ConfigError
from fedspd.experiment.build import ModelFactory, build_experiment
from fedspd.experiment.callbacks import Callback, check_callbacks
from fedspd.experiment.frames import as_frame, html_table
from fedspd.experiment.result import Result
from fedspd.experiment.resuming import check_same
from fedspd.experiment.runner import Config, as_config, as_path, is_watched
from fedspd.reporting import pages, run_figures
from fedspd.reporting.method_rows import Comparison
from fedspd.reporting.runs import check_events, is_comparison
from fedspd.storage.atomic import Json
from fedspd.storage.history import costs, reach
from fedspd.storage.run_folder import RunFolder
from fedspd.storage.temporary import TemporaryFolder

Methods = str | Sequence[str] | None
PathLike = str | Path


@dataclass(frozen=True)
class ComparisonResult:
    """Finished runs side by side: a row for each method at each point of a grid."""

    folder: Path
    comparison: Comparison = field(repr=False)
    temporary: TemporaryFolder | None = field(default=None, repr=False)  # without `out`

    def rows(self) -> list[Json]:
        """Return a dictionary for each method at each point; costs are means over its seeds."""
        rows, reference = self.comparison.rows, f"vs {self.comparison.reference}"
        has_reference = any(row.difference for row in rows)
        return [
            {
                "method": row.name,
                **row.shared_point,
                "seeds": len(row.seeds),
                self.comparison.score.title: row.score.mean,
                "± (95 %)": row.score.half,
                **({reference: row.difference and row.difference.mean} if has_reference else {}),
                "worst 10 %": row.worst,
                **{name: interval.mean for name, interval in row.metrics.items()},
                "test loss": row.test_loss.mean,
                "MB p2p": row.point_to_point / 1e6,
                "steps": row.steps,
                "seconds": row.seconds,
            }
            for row in rows
        ]

    def history(self) -> list[Json]:
        """Return the history of every run, as `Result.history`, with its method and seed."""
        return [
            {"method": run.method, **run.point, "seed": run.seed, **entry}
            for run in self.comparison.runs
            for entry in run.history
        ]

    def reach(self, target: float) -> list[Json]:
        """Return for every run what the first round with this mean accuracy, or RMSE, had cost."""
        return [
            {
                "method": run.method,
                **run.point,
                "seed": run.seed,
                **costs(reach(run.history, target)),
            }
            for run in self.comparison.runs
        ]

    def to_pandas(self) -> Any:
        """Return the rows as a DataFrame."""
        return as_frame(self.rows())

    def figures(self) -> dict[str, Any]:
        """Return the figures of the report by name, as matplotlib figures."""
        return dict(run_figures.draw_comparison(self.comparison))

    def _repr_html_(self) -> str:
        return html_table(self.rows(), f"fedspd: {self.folder}")


def compare(
    config: Config | None = None,
    *,
    data: Any = None,
    model: ModelFactory | None = None,
    methods: Methods = None,
    seeds: int = 3,
    out: PathLike | None = None,
    workers: int = 1,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> ComparisonResult:
    """Run methods with several seeds on the same data, graph and budget, and write a report.

    config, data, model   as in `run`
    methods    names, "all", or None for the recommended ones
    seeds      how many, each with its own partition and graph
    out        the folder of all runs; a comparison in it goes on, with more methods or seeds too
    workers    runs at a time
    callbacks  objects that follow all runs: their events have a field `run`
    progress   show the progress; default: in a terminal or a notebook
    """
    return sweep(
        config,
        {},
        data=data,
        model=model,
        methods=methods,
        seeds=seeds,
        out=out,
        workers=workers,
        callbacks=callbacks,
        progress=progress,
    )


def sweep(
    config: Config | None,
    grid: Mapping[str, Iterable[Any]],
    *,
    data: Any = None,
    model: ModelFactory | None = None,
    methods: Methods = None,
    seeds: int = 3,
    out: PathLike | None = None,
    workers: int = 1,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> ComparisonResult:
    """Compare at every point of a grid such as {"topology.degree": [2, 4, 6]}; see `compare`."""
    check_callbacks(callbacks)
    _check_count("seeds", seeds)
    _check_count("workers", workers)
    base = as_config(config)
    jobs = choose_jobs(base, _as_text(methods), seeds, _as_grid(grid))
    jobs = [replace(job, data=data, model=model) for job in jobs]
    temporary = TemporaryFolder() if out is None else None
    folder = temporary.path / "comparison" if temporary else as_path("out", out).absolute()
    _run(jobs, folder, workers, callbacks, progress, base.method)
    written = pages.write_report([folder], folder, base.method)
    return ComparisonResult(folder, written, temporary)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} = {value!r}: expected an integer of at least 1.")


def _as_text(methods: Methods) -> str | None:
    if methods is None or isinstance(methods, str):
        return methods
    if not isinstance(methods, Sequence) or not all(isinstance(name, str) for name in methods):
        raise ConfigError(f"methods = {methods}: expected names, such as ['fedspd', 'fedavg'].")
    return ",".join(methods) or ","  # no name at all is refused later


def _as_grid(grid: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    if not isinstance(grid, Mapping):
        raise ConfigError(
            f"grid: a value of type {type(grid).__name__}; expected a dict of lists, such as "
            "{'topology.degree': [2, 4, 6]}."
        )
    found: dict[str, list[Any]] = {}
    for key, values in grid.items():
        is_list = isinstance(values, Iterable) and not isinstance(values, str)
        found[key] = list(values) if is_list else []
        if not found[key]:
            raise ConfigError(f"grid: {key} = {values!r}: expected a list of values.")
    return found


def _run(
    jobs: list[Job],
    folder: Path,
    workers: int,
    callbacks: Sequence[Callback],
    progress: bool | None,
    reference: str,
) -> None:
    with ExitStack() as stack:
        followers = list(callbacks)
        if is_watched() if progress is None else progress:
            followers.append(stack.enter_context(ComparisonProgress(jobs, as_json=False)))
        run_all(jobs, folder, workers, followers, reference)


def report(
    runs: PathLike | Sequence[PathLike],
    out: PathLike | None = None,
    target: float | None = None,
) -> ComparisonResult:
    """Compare finished runs from their folders alone; with `out`, write the report there.

    `target` is a mean accuracy, or RMSE, of which the report says what it costs.
    """
    many = runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    folders = [as_path("runs", run) for run in many]
    if not folders:
        raise ConfigError("runs = []: expected at least one folder of run, compare or sweep.")
    reference = load().method
    if out is None:
        return ComparisonResult(folders[0], pages.read_comparison(folders, reference, target))
    return ComparisonResult(
        as_path("out", out), pages.write_report(folders, as_path("out", out), reference, target)
    )


def open_folder(
    folder: PathLike, *, data: Any = None, model: ModelFactory | None = None
) -> Result | ComparisonResult:
    """Return the Result of a finished run, or of a comparison, from its folder.

    What was passed to `run` as `data` or `model` has to be passed again.
    """
    path = as_path("folder", folder)
    if is_comparison(path):
        return report(path)
    run_folder = RunFolder.open(path)
    summary = run_folder.read_complete("result.json")
    check_events(run_folder, summary["rounds"])
    experiment = build_experiment(load(path / "config.toml"), data, model)
    check_same(run_folder, experiment)
    return Result(path.absolute(), experiment, summary)
