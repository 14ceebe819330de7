"""The command bench."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from fedspd.bench import (
    convolutions,
    memory,
    methods,
    privacy,
    rounds,
    small,
    startup,
    training,
)
from fedspd.bench.results import FULL, QUICK, BenchmarkResult, BenchmarkSize, describe_machine
from fedspd.runtime.processes import require_fork

Benchmark = Callable[[BenchmarkSize], Iterator[BenchmarkResult]]
BENCHMARKS: dict[str, Benchmark] = {
    # First, as its plain loops need an allocator that nothing else has set.
    "convolutional models": convolutions.measure_convolutions,
    "local training": training.measure_training,
    "small models": small.measure_small_models,
    "a complete round": rounds.measure_overhead,
    "FedSPD-Split": methods.measure_methods,
    "private training": privacy.measure_privacy,
    "growth": rounds.measure_growth,
    "memory": memory.measure_memory,
    "start-up": startup.measure_startup,
}


def bench(quick: bool, as_json: bool) -> None:
    """Run all benchmarks of this machine and show their results."""
    require_fork("The benchmark")
    size = QUICK if quick else FULL
    difference = training.measure_difference(size)
    results = _measure(size, BENCHMARKS)
    if as_json:
        _print_json(results, size, difference=difference)
        return
    turns = "1 turn" if size.turns == 1 else f"{size.turns} turns"
    notes = (
        f"{_describe_workload(size.clients, size.examples)}; medians of {turns}.",
        f"fedspd and the plain loop train the same parameters up to {difference:.0e} "
        "(float64, without dropout).",
    )
    Console().print(result_table(results), *notes, sep="\n")


def bench_peers(quick: bool, as_json: bool) -> None:
    """Run the benchmark of real peers and show its result."""
    from fedspd.bench import peers  # needs the extra `node`

    size = QUICK if quick else FULL
    results = _measure(size, {"peers": peers.measure_peers})
    if as_json:
        _print_json(results, size)
        return
    notes = (
        f"{_describe_workload(peers.PEERS, size.examples)}, once started.",
        "On a busy machine the ratio flatters the peers: they have more processes than the "
        "simulator.",
    )
    Console().print(result_table(results), *notes, sep="\n")


def _describe_workload(clients: int, examples: int) -> str:
    return (
        "The paper's MNIST CNN on random pixels of MNIST's shape, batch 50, 5 local epochs, "
        f"{clients} clients x {examples} examples"
    )


def _measure(size: BenchmarkSize, benchmarks: Mapping[str, Benchmark]) -> list[BenchmarkResult]:
    results: list[BenchmarkResult] = []
    with Console(stderr=True).status("") as status:
        for name, benchmark in benchmarks.items():
            status.update(f"Measuring: {name}")
            results.extend(benchmark(size))
    return results


def _print_json(results: Sequence[BenchmarkResult], size: BenchmarkSize, **more: float) -> None:
    rows = [result.as_json() for result in results]
    document = {"rows": rows, "machine": describe_machine(), "size": asdict(size), **more}
    print(json.dumps(document))


def result_table(results: Sequence[BenchmarkResult]) -> Table:
    """Return a table with a row per result."""
    table = Table(
        "benchmark",
        title="Ratios, each measured in this run",
        title_justify="left",
        show_lines=True,
    )
    for head in ("ratio", "single turns", "target", "met"):
        table.add_column(head, justify="right", no_wrap=True)
    for result in results:
        target = f"{'at least' if result.at_least else 'at most'} {result.target:.2f}"
        turns = f"{result.lowest:.2f} to {result.highest:.2f}"
        met = "yes" if result.is_met else "no"
        table.add_row(result.what, f"{result.ratio:.2f}", turns, target, met)
    return table
