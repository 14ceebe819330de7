"""The command `fedspd topology show`."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from fedspd.core.graph import Graph

app = typer.Typer(no_args_is_help=True)

BARS_AT_MOST = 15  # in the histogram of degrees
BAR_LETTERS = 30
EDGES_AT_MOST = 10_000  # in a figure; more cannot be seen
FIGURE_ENDINGS = (".png", ".pdf", ".svg")


@app.callback()
def topology() -> None:
    """Inspect the graph of the clients."""


@app.command()
def show(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="Read a TOML file, then override keys, such as topology.kind=rgg clients=50.",
        ),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the graph into this file: .png, .pdf or .svg.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON instead of tables.")
    ] = False,
) -> None:
    """Show degree, diameter, spectral gap and consensus rate of a run's first graph."""
    from rich.console import Console

    from fedspd.config import clusters_of, load, split_arguments
    from fedspd.core.keys import Key
    from fedspd.topology import build_topology, describe

    config = load(*split_arguments(settings or []))
    key = Key(config.seed)
    topology = build_topology(config.topology, config.clients, key)
    graph = topology.at(1)
    if figure:
        _draw(graph, figure)
    facts = describe(topology, key, clusters_of(config) or 1)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    notes = [f"Note: {note}." for note in facts["notes"]]
    Console().print(_facts_table(facts), _degree_table(graph), *notes, sep="\n")


def _facts_table(facts: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table(
        title=f"Topology '{facts['kind']}', weights '{facts['weights']}'",
        title_justify="left",
        show_header=False,
    )
    degrees = f"{facts['degree_min']}, {facts['degree_mean']:.4g}, {facts['degree_max']}"
    bound = "" if facts["diameter_exact"] else "at least "
    rows = {
        "clients": facts["clients"],
        "edges": facts["edges"],
        "degree: smallest, mean, largest": degrees,
        "connected": "yes" if facts["connected"] else "no",
        "diameter": f"{bound}{facts['diameter']}",
        "spectral gap": f"{facts['spectral_gap']:.4g}",
        f"consensus rate p, {facts['clusters']} cluster(s)": f"{facts['consensus_rate']:.4g}",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _degree_table(graph: "Graph") -> "Table":
    """Return a histogram of the degrees."""
    import numpy as np
    from rich.table import Table

    low, high = int(graph.degree.min()), int(graph.degree.max())
    step = (high - low) // BARS_AT_MOST + 1
    counts = np.bincount((graph.degree - low) // step).tolist()
    table = Table("degree", "clients", "", title="Degrees", title_justify="left", box=None)
    for index, count in enumerate(counts):
        first = low + index * step
        label = str(first) if step == 1 else f"{first} to {first + step - 1}"
        table.add_row(label, str(count), "█" * math.ceil(BAR_LETTERS * count / max(counts)))
    return table


def _draw(graph: "Graph", path: Path) -> None:
    from fedspd.core.errors import ConfigError
    from fedspd.reporting.network_figure import draw_network

    edges = [(i, j) for i, j in graph.edges().tolist()]
    if path.suffix.lower() not in FIGURE_ENDINGS:
        raise ConfigError(
            f"--figure {path}: unknown ending; expected one of {', '.join(FIGURE_ENDINGS)}."
        )
    if len(edges) > EDGES_AT_MOST:
        raise ConfigError(
            f"--figure {path}: {len(edges)} edges are too many to see; "
            f"expected at most {EDGES_AT_MOST}."
        )
    try:
        draw_network(edges, None, graph.clients).savefig(path)
    except OSError as error:
        raise ConfigError(
            f"--figure {path}: cannot be written ({error.strerror}); "
            "expected a file in a folder that exists."
        ) from None
