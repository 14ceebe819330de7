"""The command line: parsing only. Everything heavy is imported inside the commands, so that --help is quick."""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from fedspd.cli import data, network, node, topology
from fedspd.core.errors import ConfigError, FedspdError
from fedspd.core.machine import DEFAULT_WORKERS

STOPPED = 130  # what typer makes of a KeyboardInterrupt
EXIT_CODES = "Exit codes: 0 done; 1 a failure of the program or a worker; 2 refused (input, data, folder, disk); 130 stopped by a signal."

app = typer.Typer(
    help="A personalised model for every device of a network that has no server.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data.app, name="data")
app.add_typer(network.app, name="network")
app.add_typer(topology.app, name="topology")
app.add_typer(node.app, name="node")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(version("fedspd"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="print the version and exit"
        ),
    ] = False,
) -> None:
    """Train a personalised model for every device of a network that has no server."""


Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="a TOML file, then values on top of it"),
]
Workers = Annotated[int, typer.Option(min=1, help="processes; results do not depend on it")]
AsJson = Annotated[
    bool, typer.Option("--json", help="end with one line of JSON on standard output")
]
Methods = Annotated[str | None, typer.Option(help="names with commas between them; default: all")]
Seeds = Annotated[int, typer.Option(help="repetitions, each with a split and a graph of its own")]
VmapTrainer = Annotated[
    Path | None,
    typer.Option(
        "--out", help="folder of all runs and the report; the same one again continues it"
    ),
]


@app.command(epilog=EXIT_CODES)
def run(
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="run folder; default: a new one in runs/")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="continue the run in this folder")] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="processes; default: one per core; results do not depend on it"),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="processes of this machine, or ray: actors on a cluster")
    ] = "processes",
    address: Annotated[
        str | None,
        typer.Option(help="of a Ray cluster: auto, or HOST:PORT; default: one of its own, here"),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="also write TensorBoard files into the run folder")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only estimate memory, bytes, gradient steps and time")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train every client of a network as a config says."""
    from fedspd.cli import running

    if dry_run and resume is not None:
        raise ConfigError(
            "--dry-run estimates a run that has not begun: leave --resume out, and give the config of the run."
        )
    if dry_run:
        running.dry_run(settings or [], workers or DEFAULT_WORKERS, as_json)
    else:
        workers = DEFAULT_WORKERS if workers is None and engine == "processes" else workers
        running.run(settings or [], out, resume, workers, engine, address, tensorboard, as_json)


@app.command(epilog=EXIT_CODES)
def compare(
    settings: Settings = None,
    methods: Methods = None,
    seeds: Seeds = 3,
    out: VmapTrainer = None,
    workers: Workers = DEFAULT_WORKERS,
    as_json: AsJson = False,
) -> None:
    """Several methods on the same data, graph and budget, over several seeds, with a report."""
    from fedspd.cli import comparison

    comparison.compare(settings or [], methods, seeds, out, workers, as_json)


@app.command(epilog=EXIT_CODES)
def sweep(
    settings: Settings = None,
    methods: Methods = None,
    seeds: Seeds = 3,
    out: VmapTrainer = None,
    workers: Workers = DEFAULT_WORKERS,
    as_json: AsJson = False,
) -> None:
    """The same for every point of a grid: a key with several values, as topology.degree=2,4,6, is swept."""
    from fedspd.cli import comparison

    comparison.sweep(settings or [], methods, seeds, out, workers, as_json)


@app.command(epilog=EXIT_CODES)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="run folders, or folders of compare and sweep"),
    ],
    out: Annotated[
        Path | None, typer.Option(help="folder; default: that of the one comparison, else ./report")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The report of any runs, from their records alone."""
    from fedspd.cli import comparison

    comparison.report(runs, out, as_json)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="folder; default: a new one in runs/")] = None,
    workers: Workers = DEFAULT_WORKERS,
    as_json: AsJson = False,
) -> None:
    """FedSPD against training alone, on the handwritten digits that come with scikit-learn."""
    from fedspd.cli import running

    running.demo(out, workers, as_json)


@app.command()
def methods(as_json: AsJson = False) -> None:
    """The methods, with their options."""
    from fedspd.cli import running

    running.methods(as_json)


@app.command()
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="half a minute, whose numbers mean little")
    ] = False,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="instead: a round of eight real peers against the simulator's"
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """How fast this machine trains: ratios to a plain torch loop, each with its target."""
    from fedspd.cli import bench

    (bench.peers if peers else bench.bench)(quick, as_json)


@app.command(epilog=EXIT_CODES)
def up(
    settings: Settings = None,
    nodes: Annotated[
        int | None, typer.Option(min=2, help="how many peers; default: the config's clients")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder of the network; the same one again continues it")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A whole network of real peers on this machine, one process each, over mutual TLS."""
    from fedspd.cli import local_network

    local_network.up(settings or [], nodes, out, as_json)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    code = guarded(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
    sys.exit(code)


def guarded(arguments: list[str]) -> int:
    """Run a command line; whatever is refused becomes a sentence and an exit code."""
    try:
        code = app(arguments, standalone_mode=False) or 0
        sys.stdout.flush()
        return _refuse("Stopped.", STOPPED, arguments) if code == STOPPED else int(code)
    except FedspdError as error:
        return _refuse(str(error), error.exit_code, arguments)
    except typer.TyperException as slip:
        return (
            _refuse(slip.format_message(), slip.exit_code, arguments)
            if slip.format_message()
            else slip.exit_code
        )  # else it was help
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # a fault of ours, or of a user's own code
        traceback.print_exc()
        return _refuse(f"{type(error).__name__}: {error}", 1, arguments)


def _refuse(sentence: str, code: int, arguments: list[str]) -> int:
    print(f"fedspd: {sentence}", file=sys.stderr)
    if "--json" in arguments:
        print(json.dumps({"error": sentence, "exit_code": code}))
    return code
