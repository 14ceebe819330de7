"""The commands of `fedspd node`: run one peer on this device, and use its model."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedspd.core.imports import quick_imports
from fedspd.experiment.interrupts import interrupts

app = typer.Typer(
    help="Run one peer on this device, monitor it and use its model.", no_args_is_help=True
)
EXIT_CODES = (
    "Exit codes: 0 every round is done, or the node was told to stop; 1 the node failed; "
    "2 the bundle, the data, a folder or the disk was rejected."
)

BundleFolder = Annotated[Path, typer.Option(help="Use this bundle, which 'fedspd network' wrote.")]
State = Annotated[
    Path | None,
    typer.Option(help="Use the journal in this folder; default: state/ in the bundle."),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Train on this .npz, .csv or .parquet file; default: the examples that a simulation "
        "assigns to the node."
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(help="Listen at this host:port, if neighbours use another address."),
]
StatusPort = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="Serve /health, /status and /metrics at this port of 127.0.0.1; 0: any.",
    ),
]


class LogFormat(StrEnum):
    """The form of a log line."""

    human = "human"
    json = "json"


Log = Annotated[LogFormat, typer.Option(help="Log text, or one JSON object per line.")]
Plaintext = Annotated[
    bool,
    typer.Option(
        "--insecure-plaintext", help="Run without TLS, in a network that was created without it."
    ),
]


@app.command(epilog=EXIT_CODES)
def run(
    bundle: BundleFolder,
    data: Data = None,
    state: State = None,
    listen: Listen = None,
    status_port: StatusPort = 0,
    log: Log = LogFormat.human,
    insecure_plaintext: Plaintext = False,
) -> None:
    """Train with the neighbours until every round is done; SIGTERM finishes the step and stops."""
    with running(log):
        with quick_imports():
            from fedspd.node.host import start
            from fedspd.node.host.bundle import open_bundle

        start.run(
            open_bundle(bundle),
            data=data,
            state=state,
            listen=listen,
            status_port=status_port,
            insecure_plaintext=insecure_plaintext,
        )


@contextmanager
def running(log: LogFormat) -> Iterator[None]:
    """Start logging, and end quietly if the node is told to stop before it handles signals."""
    start_logging(log)
    with interrupts() as stop:
        try:
            yield
            return
        except KeyboardInterrupt:
            pass
        except Exception:  # of an import that a signal broke off
            if not stop.is_requested:
                raise
        stop.is_requested = False
    logging.getLogger("fedspd.node").info("node stopped before the first round")


@app.command()
def status(
    bundle: BundleFolder,
    state: State = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Show a node's round, neighbours, mixture, traffic and last errors."""
    from fedspd.cli.node_status import print_status, read_status

    found = read_status(state or bundle / "state")
    print(json.dumps(found)) if as_json else print_status(found)


@app.command()
def rollback(
    bundle: BundleFolder,
    to: Annotated[int, typer.Option(min=1, help="Go back to the state after this round.")],
    state: State = None,
) -> None:
    """Give up the last rounds of a stopped node, after a neighbour has spoilt its models.

    The state after the last five rounds is kept. The node continues from there, in the round of its
    neighbours, and its next heartbeat tells them.
    """
    from fedspd.node.host.bundle import open_bundle
    from fedspd.node.host.rollback import roll_back

    last = roll_back(open_bundle(bundle), to, state)
    print(f"The node is back after round {to}; it was after round {last}.")


@app.command()
def export(
    bundle: BundleFolder,
    to: Annotated[Path, typer.Option(help="Write this file, .onnx or .safetensors.")],
    state: State = None,
) -> None:
    """Export the node's personal model for other programs."""
    from fedspd.node.host import export
    from fedspd.node.host.bundle import open_bundle

    if note := export.export(open_bundle(bundle), to, state):
        typer.echo(note, err=True)
    print(to)


@app.command()
def predict(
    bundle: BundleFolder,
    data: Annotated[Path, typer.Option(help="Read the array x of this .npz file.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the scores as the array y of this .npz file; default: print the class, or "
            "the value of a regression, of every example."
        ),
    ] = None,
    state: State = None,
) -> None:
    """Predict examples with the node's personal model."""
    from fedspd.node.host import export
    from fedspd.node.host.bundle import open_bundle

    opened = open_bundle(bundle)
    scores = export.predict(opened, data, state)
    if out is not None:
        export.write_scores(scores, out)
        print(out)
        return
    for score in scores:
        values = " ".join(f"{value:.6g}" for value in score.flatten().tolist())
        print(int(score.argmax()) if opened.manifest.classes else values)


class JsonFormatter(logging.Formatter):
    """Formats a log record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        about = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            about["traceback"] = self.formatException(record.exc_info)
        return json.dumps(about)


def start_logging(log_format: LogFormat) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.json else text)
    logger = logging.getLogger("fedspd")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
