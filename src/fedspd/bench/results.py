"""Results of benchmarks: a ratio, its target, and whether it is met."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

TimedTask = Callable[[], float]  # works once and returns the seconds that this took


@dataclass(frozen=True)
class BenchmarkSize:
    """The amount of work of all benchmarks."""

    clients: int
    examples: int  # of each client
    turns: int  # repetitions of each timing
    growth: tuple[int, ...]  # numbers of clients
    wide: int  # clients of the run whose memory is measured


FULL = BenchmarkSize(clients=20, examples=300, turns=5, growth=(20, 200, 2000), wide=900)
QUICK = BenchmarkSize(clients=4, examples=10, turns=1, growth=(20, 200), wide=90)


@dataclass(frozen=True)
class BenchmarkResult:
    """The median ratio of all turns, with its target."""

    name: str
    what: str  # the meaning of the ratio
    ratio: float
    target: float
    at_least: bool  # whether the target is a lower bound, else an upper one
    lowest: float  # ratio of a single turn
    highest: float
    numbers: dict[str, float] = field(default_factory=dict)  # the medians behind the ratio

    @classmethod
    def from_turns(
        cls,
        name: str,
        what: str,
        ratios: Sequence[float],
        target: float,
        at_least: bool,
        **numbers: float,
    ) -> "BenchmarkResult":
        """Summarise the ratios of all turns."""
        summary = (median(ratios), min(ratios), max(ratios))
        ratio, lowest, highest = (round(value, 3) for value in summary)
        rounded = {key: float(f"{value:.4g}") for key, value in numbers.items()}
        return cls(name, what, ratio, target, at_least, lowest, highest, rounded)

    @property
    def is_met(self) -> bool:
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.is_met}


def time_in_turns(tasks: Sequence[TimedTask], turns: int) -> list[tuple[float, ...]]:
    """Return the seconds of every task in every turn.

    Tasks alternate, so that other load on the machine meets all of them. The first turn is a
    warm-up and does not count.
    """
    return [tuple(task() for task in tasks) for _ in range(turns + 1)][1:]


def describe_machine() -> dict[str, Any]:
    """Return the processor, the system and the versions that determine the speed."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2] for line in file if line.startswith("model name")]
    except OSError:
        return platform.processor() or platform.machine()
    return names[0].strip() if names else platform.machine()
