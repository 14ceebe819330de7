"""Terminal tables of finished runs and comparisons."""

from collections.abc import Callable, Mapping

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedspd.reporting.columns import (
    Column,
    comparison_columns,
    format_loss,
    format_megabytes,
    format_percent,
    is_best,
    point_cells,
)
from fedspd.reporting.method_rows import Comparison, MethodRow
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
    """Return a row per run: accuracy across clients, or loss in a regression, and the cost.

    Where the table does not fit, the heads take two lines; then the last columns are left out.
    """
    table = _summary_table(summaries, " ")
    if not fits(table):
        table = _summary_table(summaries, "\n")
    while not fits(table) and len(table.columns) > 2:
        table.columns.pop()
    return table


def _summary_table(summaries: Mapping[str, Json], separator: str) -> Table:
    scores = [summary["accuracy"]["mean"] for summary in summaries.values()]
    is_classification = any(score is not None for score in scores)
    metric = "accuracy across clients (%)" if is_classification else "loss across clients"
    table = Table(title=f"Test {metric} and communication cost", title_justify="left")
    heads = ("mean", "spread", "worst 10 %", "before final") if is_classification else ("mean",)
    table.add_column("method", no_wrap=True)
    for head in (*heads, "models", "MB multicast", "MB p2p", "time (s)"):
        table.add_column(head.replace(" ", separator, 1), justify="right", no_wrap=True)
    for method, summary in summaries.items():
        cells = _accuracy_cells(summary) if is_classification else _loss_cells(summary)
        table.add_row(escape(method), *cells, *_cost_cells(summary))
    return table


def _accuracy_cells(summary: Json) -> list[str]:
    score, before = summary["accuracy"], summary["accuracy_before_final_phase"]
    fractions = (score["mean"], score["std"], score["worst"], before["mean"])
    return [format_percent(fraction) for fraction in fractions]


def _loss_cells(summary: Json) -> list[str]:
    return [format_loss(mean(summary["clients"]["test_loss"]))]


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
    accuracy, loss = newcomers["accuracy"]["mean"], mean(newcomers["test_loss"])
    score = f"a test loss of {format_loss(loss)}"
    if accuracy is not None:
        score = f"an accuracy of {format_percent(accuracy)} %"
    return f"newcomers have {score} on average"


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
    """Return as many columns as fit, but at least the accuracy, or the loss of a regression."""
    is_classification = any(row.accuracy.mean is not None for row in comparison.rows)
    metric = "accuracy" if is_classification else "loss"
    losses = () if is_classification else ("test loss", "newcomers' loss")
    columns = [
        column
        for column in comparison_columns(comparison)
        if column.is_brief or column.title in losses
    ]
    for count in range(len(columns), 2, -1):
        table = _comparison_table(comparison, columns[:count], metric)
        if fits(table):
            return table
    return _comparison_table(comparison, columns[:2], metric)


def explain_intervals(comparison: Comparison) -> str | None:
    """Return what ± means in the table, and how much it says; None if no row has one."""
    seeds = sorted({len(row.seeds) for row in comparison.rows} - {1})
    if not seeds:
        return None
    words = "± is half of the 95 % confidence interval over seeds (Student's t)."
    if seeds[0] == 2:
        words += " Two seeds say little: such an interval is 12.7 standard errors to each side."
    return words


def _comparison_table(comparison: Comparison, columns: list[Column], metric: str) -> Table:
    table = Table(
        title=f"Test {metric} and cost",
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
