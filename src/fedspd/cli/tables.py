"""Terminal tables of finished runs and comparisons."""

from collections.abc import Callable, Mapping

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedspd.core.scores import ACCURACY, OTHER_SCORES, RMSE, TEST_LOSS, Score, main_score
from fedspd.reporting.columns import (
    Column,
    comparison_columns,
    format_megabytes,
    format_percent,
    is_best,
    point_cells,
)
from fedspd.reporting.method_rows import Comparison, MethodRow, mean_score
from fedspd.reporting.statistics import mean
from fedspd.storage.atomic import Json

UNLIMITED_WIDTH = 1000  # columns of a table that is not shown on a terminal

Fits = Callable[[Table], bool]


def wide_console(is_stderr: bool) -> Console:
    """Return a console as wide as the terminal; elsewhere its width is not limited."""
    console = Console(stderr=is_stderr)
    if not console.is_terminal:
        console.width = UNLIMITED_WIDTH
    return console


def fits_console(console: Console, table: Table) -> bool:
    """Return whether the console is wide enough to show the table without cutting a word."""
    options = console.options.update(width=UNLIMITED_WIDTH)
    return console.measure(table, options=options).maximum <= console.width


def summary_table(summaries: Mapping[str, Json], fits: Fits) -> Table:
    """Return a row per run: accuracy across clients, or RMSE in a regression, and the cost.

    Where the table does not fit, the heads take two lines; then the last columns are left out.
    """
    table = _summary_table(summaries, " ")
    if not fits(table):
        table = _summary_table(summaries, "\n")
    while not fits(table) and len(table.columns) > 2:
        table.columns.pop()
    return table


def _summary_table(summaries: Mapping[str, Json], separator: str) -> Table:
    first = next(iter(summaries.values()))
    score = main_score(first["clients"])
    unit = " (%)" if score.is_percent else ""
    title = f"Test {score.title} across clients{unit} and communication cost"
    table = Table(title=title, title_justify="left")
    others = [other for other in OTHER_SCORES if other.name in (first.get("metrics") or {})]
    heads = ["mean"] if score == TEST_LOSS else ["mean", "spread", "worst 10 %", "before final"]
    heads += [other.heading for other in others]
    table.add_column("method", no_wrap=True)
    for head in (*heads, "models", "MB multicast", "MB p2p", "time (s)"):
        table.add_column(head.replace(" ", separator, 1), justify="right", no_wrap=True)
    for method, summary in summaries.items():
        further = [other.text(summary["metrics"][other.name]["mean"]) for other in others]
        table.add_row(
            escape(method), *_score_cells(summary, score), *further, *_cost_cells(summary)
        )
    return table


def _score_cells(summary: Json, score: Score) -> list[str]:
    if score == TEST_LOSS:
        return [score.text(mean(summary["clients"]["test_loss"]))]
    final, before = summary["accuracy"], summary["accuracy_before_final_phase"]
    if score != ACCURACY:
        final = summary["metrics"][score.name]
        before = summary.get("metrics_before_final_phase", {}).get(score.name, {})
    numbers = (final["mean"], final["std"], final["worst"], before.get("mean"))
    return [score.text(number) for number in numbers]


def _cost_cells(summary: Json) -> list[str]:
    sent = summary["bytes"]
    return [
        f"{summary['models_sent']:,}",
        format_megabytes(sent["multicast"]),
        format_megabytes(sent["point_to_point"]),
        f"{summary['seconds']:.1f}",
    ]


def describe_newcomers(newcomers: Json) -> str:
    """Return a sentence about the clients that joined after training."""
    known = {s.name: mean_score(newcomers, s.name) for s in (ACCURACY, RMSE, TEST_LOSS)}
    score = main_score(known)
    article = "a" if score == TEST_LOSS else "an"
    found = score.text(known.get(score.name))
    return f"newcomers have {article} {score.title} of {found}{score.unit} on average"


def describe_clusters(summary: Json) -> str:
    """Return how many clusters the method found, and whether they share a body."""
    if (count := summary["clusters"]) == 1:
        return "found 1 cluster"
    bodies = (
        "which share one body" if summary.get("bodies", 1) == 1 else "each with a body of its own"
    )
    return f"found {count} clusters, {bodies}"


def describe_distributions(summary: Json) -> str:
    """Return the accuracy on each distribution, and how well the clusters agree with them."""
    record = summary["distributions"]
    scores = zip(record["names"], record["accuracy"], strict=True)
    found = "accuracy by distribution: " + ", ".join(
        f"{name} {format_percent(score)} %" for name, score in scores
    )
    purity, index = summary["purity"], summary["adjusted_rand_index"]
    if purity is not None and index is not None:
        found += f"; purity {purity:.2f}, adjusted Rand index {index:.2f}"
    return found


def comparison_table(comparison: Comparison, fits: Fits) -> Table:
    """Return as many columns as fit, but at least the accuracy, or the RMSE of a regression."""
    columns = [column for column in comparison_columns(comparison) if column.is_brief]
    for count in range(len(columns), 2, -1):
        table = _comparison_table(comparison, columns[:count])
        if fits(table):
            return table
    return _comparison_table(comparison, columns[:2])


def explain_intervals(comparison: Comparison) -> str | None:
    """Return what ± means in the table, and how much it says; None if no row has one."""
    seeds = sorted({len(row.seeds) for row in comparison.rows} - {1})
    if not seeds:
        return None
    words = "± is half of the 95 % confidence interval over seeds (Student's t)."
    if seeds[0] == 2:
        words += " Two seeds say little: such an interval is 12.7 standard errors to each side."
    return words


def _comparison_table(comparison: Comparison, columns: list[Column]) -> Table:
    table = Table(
        title=f"Test {comparison.score.title} and cost",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    for name in [*comparison.shared_axes, "method"]:
        table.add_column(name.rpartition(".")[2], no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for row in comparison.rows:
        names = [escape(name) for name in [*point_cells(comparison, row), row.name]]
        table.add_row(*names, *(_cell(comparison, row, column) for column in columns))
    return table


def _cell(comparison: Comparison, row: MethodRow, column: Column) -> str:
    text = column.text(row)
    return f"[bold]{text}[/]" if is_best(comparison, row, column) else text
