"""How a measurement is said: a ratio, its target, and whether it is met."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

Contestant = Callable[[], float]  # does its work once and says how many seconds passed


@dataclass(frozen=True)
class Size:
    """How much is measured; `quick` shows that everything works, and its numbers mean little."""

    clients: int
    examples: int
    turns: int
    growth: tuple[int, ...]  # numbers of clients


FULL = Size(clients=20, examples=300, turns=5, growth=(20, 200, 2000))
QUICK = Size(clients=4, examples=50, turns=1, growth=(20, 200))


@dataclass(frozen=True)
class BenchRow:
    name: str
    what: str
    ratio: float
    target: float
    at_least: bool  # else: at most
    lowest: float  # of a single turn
    highest: float
    numbers: dict[str, float] = field(default_factory=dict)  # what the ratio was made of

    @classmethod
    def of(
        cls,
        name: str,
        what: str,
        ratios: Sequence[float],
        target: float,
        at_least: bool,
        **numbers: float,
    ) -> "BenchRow":
        found = (median(ratios), min(ratios), max(ratios))
        ratio, lowest, highest = (round(value, 3) for value in found)
        return cls(
            name,
            what,
            ratio,
            target,
            at_least,
            lowest,
            highest,
            {key: float(f"{value:.4g}") for key, value in numbers.items()},
        )

    @property
    def met(self) -> bool:
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def take_turns(contestants: Sequence[Contestant], turns: int) -> list[tuple[float, ...]]:
    """Seconds of every contestant in every turn, one after the other, so that whatever else the machine does meets all;
    the first turn warms up and is not counted."""
    return [tuple(contestant() for contestant in contestants) for _ in range(turns + 1)][1:]


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.machine(),
            )
    except OSError:
        return platform.processor() or platform.machine()
