"""Parse the command line.

Commands import what they need when they run, so that --help is quick.
"""

import errno
import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from fedspd.cli import data, network, node, topology
from fedspd.core.errors import FedspdError
from fedspd.core.imports import quick_imports
from fedspd.core.machine import DEFAULT_WORKERS
from fedspd.experiment.interrupts import interrupts

STOPPED = 130  # typer's code of a KeyboardInterrupt
EXIT_CODES = (
    "Exit codes: 0 success; 1 the program, a worker or a node failed; 2 an argument, the config, "
    "the data, a folder or the disk was rejected; 3 a run diverged: its loss is not finite; "
    "130 stopped by a signal."
)

app = typer.Typer(
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for name, group in (
    ("data", data.app),
    ("network", network.app),
    ("topology", topology.app),
    ("node", node.app),
):
    app.add_typer(group, name=name, epilog=EXIT_CODES)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        print(version("fedspd"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train a personalised model for every device of a network that has no server."""


Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...", help="Read a TOML file, then override single keys."
    ),
]
Workers = Annotated[
    int, typer.Option(min=1, help="Use this many processes; it does not change the result.")
]
OptionalWorkers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Use this many processes; default: one per core. It does not change the result.",
    ),
]
EngineName = Annotated[
    str,
    typer.Option(help="Train in processes of this machine, or with ray in actors of a cluster."),
]
Address = Annotated[
    str | None,
    typer.Option(help="Use this Ray cluster: auto or HOST:PORT; default: a new one, here."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="End with one line of JSON on standard output.")
]
Methods = Annotated[
    str | None,
    typer.Option(
        help="Run these methods, separated by commas, or all; default: fedspd-split, fedspd, "
        "fedavg plain and fine-tuned, local."
    ),
]
Seeds = Annotated[
    int, typer.Option(help="Repeat with this many seeds, each with its own partition and graph.")
]
OutputFolder = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Write all runs and the report into this folder, or continue those in it."
    ),
]


@app.command(epilog=EXIT_CODES)
def run(
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the run into this folder; default: a new one in runs/."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.")] = None,
    workers: OptionalWorkers = None,
    engine: EngineName = "processes",
    address: Address = None,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Also write TensorBoard files into the run folder."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only estimate memory, bytes, gradient steps and time."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Train every client of a network with one method."""
    with quick_imports():
        from fedspd.cli import running

    if dry_run:
        running.dry_run(settings or [], resume, workers or DEFAULT_WORKERS, as_json)
        return 0
    workers = _workers(workers, engine)
    return running.run(settings or [], out, resume, workers, engine, address, tensorboard, as_json)


def _workers(workers: int | None, engine: str) -> int | None:
    """Return how many to use: by default one per core of this machine, or all that Ray has."""
    return DEFAULT_WORKERS if workers is None and engine == "processes" else workers


@app.command(epilog=EXIT_CODES)
def compare(
    settings: Settings = None,
    methods: Methods = None,
    seeds: Seeds = 3,
    out: OutputFolder = None,
    workers: Workers = DEFAULT_WORKERS,
    as_json: AsJson = False,
) -> None:
    """Compare methods on the same data, graph and budget over several seeds, and write a report."""
    with quick_imports():
        from fedspd.cli import comparison

    comparison.compare(settings or [], methods, seeds, out, workers, as_json)


@app.command(epilog=EXIT_CODES)
def sweep(
    settings: Settings = None,
    methods: Methods = None,
    seeds: Seeds = 3,
    out: OutputFolder = None,
    workers: Workers = DEFAULT_WORKERS,
    as_json: AsJson = False,
) -> None:
    """Compare methods at every point of a grid such as topology.degree=2,4,6; write a report."""
    with quick_imports():
        from fedspd.cli import comparison

    comparison.compare(settings or [], methods, seeds, out, workers, as_json, is_sweep=True)


@app.command(epilog=EXIT_CODES)
def advise(
    settings: Settings = None, workers: Workers = DEFAULT_WORKERS, as_json: AsJson = False
) -> None:
    """Say which method fits the data and why, after a few rounds of three methods."""
    with quick_imports():
        from fedspd.cli import comparison

    comparison.advise(settings or [], workers, as_json)


@app.command(epilog=EXIT_CODES)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Read these folders of run, compare and sweep."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write into this folder; default: that of a single comparison, else ./report."
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Show the cost of this accuracy, such as 0.8, or of this RMSE; default: 95 % of "
            "the best."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report of any runs, from their records alone."""
    with quick_imports():
        from fedspd.cli import comparison

    comparison.report(runs, out, target, as_json)


@app.command(epilog=EXIT_CODES)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Read this folder of a finished run.")],
    to: Annotated[
        Path, typer.Option(help="Write this file: .onnx (extra onnx), .pt2 or .safetensors.")
    ],
    client: Annotated[int, typer.Option(min=0, help="Take the model of this client.")] = 0,
) -> None:
    """Write the personal model of a client as a file for other programs."""
    with quick_imports():
        from fedspd.cli import running

    running.export(run, client, to)


@app.command(epilog=EXIT_CODES)
def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="Write or continue in this folder; default: a new one in runs/."),
    ] = None,
    workers: Workers = DEFAULT_WORKERS,
    as_json: AsJson = False,
) -> None:
    """Compare five methods on clients of two populations that label digits differently."""
    with quick_imports():
        from fedspd.cli import comparison

    comparison.demo(out, workers, as_json)


@app.command(epilog=EXIT_CODES)
def paper(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[show] [EXPERIMENT]",
            help="Run an experiment by its name, from a TOML file of your own, or all; or show "
            "one. Without it, list them.",
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="Run at this scale: tiny, small, or paper for its own setting.")
    ] = "small",
    reading: Annotated[
        str, typer.Option(help="Follow the paper's text or its published code where they differ.")
    ] = "text",
    out: Annotated[
        Path, typer.Option(help="Write runs, records and reports into this folder, or continue.")
    ] = Path("paper"),
    workers: OptionalWorkers = None,
    engine: EngineName = "processes",
    address: Address = None,
    device: Annotated[str, typer.Option(help="Train on this device: cpu, cuda or auto.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Repeat tables and figures of the FedSPD paper, with the paper's values beside ours."""
    with quick_imports():
        from fedspd.cli import paper
        from fedspd.comparison.scheduler import Machine

    machine = Machine(_workers(workers, engine), engine, address)
    raise typer.Exit(paper.paper(words or [], scale, reading, out, machine, device, as_json))


@app.command(epilog=EXIT_CODES)
def privacy(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG | RUN] [KEY=VALUE]...",
            help="Read a TOML file and override keys, or read a run folder or a node's journal.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the privacy budget that a run will spend, or has spent, by round and neighbour."""
    with quick_imports():
        from fedspd.cli import privacy

    privacy.show(settings or [], as_json)


@app.command(epilog=EXIT_CODES)
def methods(as_json: AsJson = False) -> None:
    """List the methods and their options."""
    from fedspd.cli.methods import list_methods

    list_methods(as_json)


@app.command(epilog=EXIT_CODES)
def bench(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Take half a minute, only to show that all works; the numbers mean little.",
        ),
    ] = False,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="Instead, compare a round of eight peers with the simulator's."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine trains, as ratios to a plain torch loop with their targets."""
    with quick_imports():
        from fedspd.cli import bench

    if peers:
        bench.bench_peers(quick, as_json)
    else:
        bench.bench(quick, as_json)


@app.command(epilog=EXIT_CODES)
def up(
    settings: Settings = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=2, help="Start this many peers; default: the config's clients."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the network into this folder, or continue the one in it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a network of real peers on this machine: one process each, over mutual TLS."""
    with quick_imports():
        from fedspd.cli import local_network

    local_network.up(settings or [], nodes, out, as_json)


def main() -> None:
    """Run the command line of this process and exit."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    _open_closed_streams()
    code = execute(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
    sys.exit(code)


def _open_closed_streams() -> None:
    """Give output that the caller has closed to nobody; else a file of ours takes its number."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def execute(arguments: list[str]) -> int:
    """Run a command line and return its exit code; print an error as one sentence."""
    with interrupts() as stop:
        try:
            code = app(arguments, standalone_mode=False) or 0
            sys.stdout.flush()
        except KeyboardInterrupt:  # outside of a command
            code = STOPPED
        except SystemExit as left:  # of rich, where the reader of our output has gone
            code = 0 if isinstance(left.__context__, BrokenPipeError) else int(left.code or 0)
        except Exception as error:  # of an import that a signal broke off too
            code = STOPPED if stop.is_requested else _explain(error, arguments)
        stop.is_requested = False  # the command is over
    return _reject("Stopped.", STOPPED, arguments) if code == STOPPED else int(code)


def _explain(error: Exception, arguments: list[str]) -> int:
    """Print what went wrong, and return the exit code."""
    if isinstance(error, FedspdError):
        return _reject(str(error), error.exit_code, arguments)
    if isinstance(error, typer.TyperException):
        message = _as_sentence(error)  # empty if help was printed
        return _reject(message, error.exit_code, arguments) if message else error.exit_code
    if isinstance(error, BrokenPipeError):  # the reader of our output has gone
        _silence_stdout()
        return 0
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _silence_stdout()
        return _reject(
            "The output could not be written: the disk is full. Make room.", 2, arguments
        )
    traceback.print_exception(error)  # a fault of ours, or of a user's own code
    return _reject(f"{type(error).__name__}: {error}", 1, arguments)


def _silence_stdout() -> None:
    """Let no later write to standard output fail, nor the one at the exit of Python."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _as_sentence(error: typer.TyperException) -> str:
    """Return an error of typer in the form of the others, where it names what it expects."""
    from pydantic import ValidationError

    message = error.format_message().replace("a valid integer", "an integer")
    message = re.sub(r"^Invalid value for '([^']+)': Value error, ", r"\1: ", message)
    found = re.fullmatch(r"Invalid value for '([^']+)': Input should be ([^,]+)(,.*)?", message)
    if found is None:
        return message
    prefix = "a number " if found[2].startswith(("greater", "less")) else ""
    checked = error.__cause__  # of pydantic, which knows the value
    value = checked.errors()[0]["input"] if isinstance(checked, ValidationError) else ""
    return f"{found[1]} {value}: expected {prefix}{found[2]}."


def _reject(sentence: str, code: int, arguments: list[str]) -> int:
    print(f"fedspd: {sentence}", file=sys.stderr)
    if "--json" in arguments:
        print(json.dumps({"error": sentence, "exit_code": code}))
    return code
