"""What bench does: measure, and show what was found."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from fedspd.bench import rounds, startup, training
from fedspd.bench.rows import FULL, QUICK, BenchRow, Size, machine
from fedspd.runtime.processes import require_fork

Measurement = Callable[[Size], Iterator[BenchRow]]
MEASUREMENTS: dict[str, Measurement] = {
    "local training": training.rows,
    "a whole round": rounds.overhead_rows,
    "growth": rounds.growth_rows,
    "start-up": startup.rows,
}
WORKLOAD = "The paper's MNIST CNN on random pixels of MNIST's shape, batch 50, 5 local epochs, {clients} clients x {examples} examples"


def bench(quick: bool, as_json: bool) -> None:
    require_fork("The benchmark")
    size = QUICK if quick else FULL
    difference = training.difference(size)
    rows = _measure(size, MEASUREMENTS)
    if as_json:
        about = {"machine": machine(), "size": asdict(size), "difference": difference}
        print(json.dumps({"rows": [row.as_json() for row in rows], **about}))
        return
    notes = (
        f"{WORKLOAD.format(clients=size.clients, examples=size.examples)}; medians of {size.turns} turn{'s' if size.turns > 1 else ''}.",
        f"fedspd and the plain loop train the same parameters up to {difference:.0e} (float64, without dropout).",
    )
    Console().print(table(rows), *notes, sep="\n")


def bench_peers(quick: bool, as_json: bool) -> None:
    from fedspd.bench import peers  # needs the extra `node`

    size = QUICK if quick else FULL
    rows = _measure(size, {"peers": peers.rows})
    if as_json:
        print(
            json.dumps(
                {
                    "rows": [row.as_json() for row in rows],
                    "machine": machine(),
                    "size": asdict(size),
                }
            )
        )
        return
    notes = (
        f"{WORKLOAD.format(clients=peers.PEERS, examples=size.examples)}, once started.",
        "On a machine that is busy with other work the ratio flatters the peers: they are more processes than the simulator has.",
    )
    Console().print(table(rows), *notes, sep="\n")


def _measure(size: Size, measurements: Mapping[str, Measurement]) -> list[BenchRow]:
    found: list[BenchRow] = []
    with Console(stderr=True).status("") as status:
        for name, measurement in measurements.items():
            status.update(f"Measuring: {name}")
            found.extend(measurement(size))
    return found


def table(rows: list[BenchRow]) -> Table:
    shown = Table(
        "what", title="Ratios, each measured in this run", title_justify="left", show_lines=True
    )
    for column in ("ratio", "of single turns", "target", "met"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        target = f"{'at least' if row.at_least else 'at most'} {row.target:.2f}"
        spread = f"{row.lowest:.2f} to {row.highest:.2f}"
        shown.add_row(row.what, f"{row.ratio:.2f}", spread, target, "yes" if row.met else "no")
    return shown
