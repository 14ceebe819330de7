"""fedspd topology: what the graph of a config is like."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from fedspd.core.graph import Graph

app = typer.Typer(no_args_is_help=True)

BARS = 15  # the most lines of a histogram
FIGURE_KINDS = (".png", ".pdf", ".svg")
FIGURE_EDGES = 10_000


@app.callback()
def topology() -> None:
    """Look at the graph of clients."""


@app.command()
def show(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A config file, and keys such as topology.kind=rgg clients=50 seed=1.",
        ),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the graph into this file: .png, .pdf or .svg.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON instead of tables.")
    ] = False,
) -> None:
    """Show degree, diameter, spectral gap and consensus rate of the graph that a run would start with."""
    from json import dumps

    from rich.console import Console

    from fedspd import config
    from fedspd.core.keys import Key
    from fedspd.topology import build_topology, describe

    settings = config.load(*config.split_arguments(words or []))
    key = Key(settings.seed)
    built = build_topology(settings.topology, settings.clients, key)
    graph = built.at(1)
    if figure:
        _draw(graph, figure)
    facts = describe(built, key, settings.clusters)
    if json:
        typer.echo(dumps(facts))
    else:
        Console().print(
            _facts_table(facts),
            _degree_table(graph),
            *(f"Note: {note}." for note in facts["notes"]),
            sep="\n",
        )


def _facts_table(facts: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table(
        title=f"Topology '{facts['kind']}', weights '{facts['weights']}'",
        title_justify="left",
        show_header=False,
    )
    table.add_row("clients", f"{facts['clients']}")
    table.add_row("edges", f"{facts['edges']}")
    table.add_row(
        "degree: smallest, mean, largest",
        f"{facts['degree_min']}, {facts['degree_mean']:.4g}, {facts['degree_max']}",
    )
    table.add_row("connected", "yes" if facts["connected"] else "no")
    table.add_row(
        "diameter", f"{'' if facts['diameter_exact'] else 'at least '}{facts['diameter']}"
    )
    table.add_row("spectral gap", f"{facts['spectral_gap']:.4g}")
    table.add_row(
        f"consensus rate p, {facts['clusters']} cluster(s)", f"{facts['consensus_rate']:.4g}"
    )
    return table


def _degree_table(graph: "Graph") -> "Table":
    """A histogram of degrees, in at most BARS lines."""
    import numpy as np
    from rich.table import Table

    low, high = int(graph.degree.min()), int(graph.degree.max())
    step = (high - low) // BARS + 1
    counts = np.bincount((graph.degree - low) // step).tolist()
    table = Table("degree", "clients", "", title="Degrees", title_justify="left", box=None)
    for place, count in enumerate(counts):
        first = low + place * step
        label = str(first) if step == 1 else f"{first} to {first + step - 1}"
        table.add_row(label, str(count), "█" * -(-30 * count // max(counts)))
    return table


def _draw(graph: "Graph", path: Path) -> None:
    from fedspd.core.errors import ConfigError
    from fedspd.reporting.figures import draw_network

    edges = [(i, j) for i, j in graph.edges().tolist()]
    if path.suffix.lower() not in FIGURE_KINDS:
        raise ConfigError(
            f"--figure {path} has an unknown ending: expected one of {', '.join(FIGURE_KINDS)}."
        )
    if len(edges) > FIGURE_EDGES:
        raise ConfigError(
            f"--figure {path} would have {len(edges)} edges, too many to see: draw a graph of at most {FIGURE_EDGES}."
        )
    try:
        draw_network(edges, None, graph.clients).savefig(path)
    except OSError as problem:
        raise ConfigError(
            f"--figure {path} cannot be written ({problem.strerror}): give a file in a folder that exists."
        ) from None
