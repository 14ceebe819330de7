"""One peer on this device."""

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

app = typer.Typer(
    help="One peer on this device: run it, watch it, take its model.", no_args_is_help=True
)

BundleFolder = Annotated[
    Path, typer.Option(help="the node's folder, as 'fedspd network create' made it")
]
State = Annotated[
    Path | None, typer.Option(help="where the node keeps its rounds; default: state/ in the bundle")
]
Data = Annotated[
    str | None,
    typer.Option(
        help="the device's own examples, as .npz; default: those that a simulation would deal"
    ),
]
Listen = Annotated[
    str | None, typer.Option(help="host:port to listen on, if it is not where the neighbours call")
]
StatusPort = Annotated[
    int,
    typer.Option(min=0, max=65535, help="of /health, /status and /metrics on this machine; 0: any"),
]


class LogFormat(StrEnum):
    human = "human"
    json = "json"


Log = Annotated[LogFormat, typer.Option(help="lines for people, or one JSON object a line")]
Plaintext = Annotated[
    bool,
    typer.Option(
        "--insecure-plaintext", help="only for a network created so: no encryption, no identity"
    ),
]


@app.command(
    epilog="Exit codes: 0 done, or left as told; 1 failed; 2 refused (bundle, data, folder, disk)."
)
def run(
    bundle: BundleFolder,
    data: Data = None,
    state: State = None,
    listen: Listen = None,
    status_port: StatusPort = 0,
    log: Log = LogFormat.human,
    insecure_plaintext: Plaintext = False,
) -> None:
    """Train with the neighbours until every round is done. SIGTERM finishes the step, commits and leaves."""
    with running(log):
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
    """A node that is told to leave before its first round has nothing to finish."""
    start_logging(log)
    try:
        yield
    except KeyboardInterrupt:
        logging.getLogger("fedspd.node").info("left before the first round")


@app.command()
def status(
    bundle: BundleFolder,
    state: State = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Round, neighbours, mixture, bytes and the last errors of a node."""
    from fedspd.cli.node_status import show, status_of

    found = status_of(state or bundle / "state")
    print(json.dumps(found)) if as_json else show(found)


@app.command()
def export(
    bundle: BundleFolder,
    to: Annotated[Path, typer.Option(help="model.onnx or model.safetensors")],
    state: State = None,
) -> None:
    """The node's own model as a file for other programs."""
    from fedspd.node.host import export
    from fedspd.node.host.bundle import open_bundle

    export.export(open_bundle(bundle), to, state)
    print(to)


@app.command()
def predict(
    bundle: BundleFolder,
    data: Annotated[Path, typer.Option(help="an .npz file with the array x")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="write the scores here, as .npz with the array y; default: print the classes, or a regression's values"
        ),
    ] = None,
    state: State = None,
) -> None:
    """What the node's own model says of some examples."""
    from fedspd.node.host import export
    from fedspd.node.host.bundle import open_bundle

    opened = open_bundle(bundle)
    scores = export.predict(opened, data, state)
    if out is not None:
        export.write_scores(scores, out)
        print(out)
        return
    classes = opened.manifest.classes
    for score in scores:
        print(
            int(score.argmax())
            if classes
            else " ".join(f"{value:.6g}" for value in score.flatten().tolist())
        )


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        about = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            about["traceback"] = self.formatException(record.exc_info)
        return json.dumps(about)


def start_logging(kind: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines()
        if kind is LogFormat.json
        else logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    )
    logger = logging.getLogger("fedspd")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
