"""What an engine is: blocks of clients that compute, and meet at every exchange."""

import time
import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedspd.core.errors import WorkerError
from fedspd.core.exchange import Exchange
from fedspd.core.graph import Graph
from fedspd.core.ledger import Traffic, traffic
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.measures import Measures
from fedspd.runtime.plan import Plan


class BlockLostError(WorkerError):
    """A block went down with its process or machine; the engine that lost it can begin or load anew, and go on.

    The message is the beginning of a sentence: whoever goes on, or gives up, says so.
    """


@dataclass(frozen=True)
class RoundReport:
    traffic: list[Traffic]
    seconds: dict[str, float]  # by step, of the slowest worker, and the total that passed
    steps: int  # gradient steps of all clients


class Engine(ABC):
    """A run calls begin or load, then rounds; each of the two starts from nothing, whatever happened before."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def begin(self) -> None:
        self._all("begin")

    def round(self, round: int, graph: Graph) -> RoundReport:
        """One round of every client: blocks compute, and meet at every exchange."""
        started, sent = time.perf_counter(), []
        headers = self._all("start_round", round)
        while any(header is not None for header in headers):
            header = Announcements.joined(headers)
            element = torch.finfo(self.plan.learner.dtype).bits // 8
            size = header.size * element
            sent.append(traffic(graph, header.cluster_CK, header.want_CM, size, header.is_model))
            headers = self._exchange(graph, header)
        return self._report(started, sent)

    def finish(self, round: int) -> RoundReport:
        started = time.perf_counter()
        self._all("finish", round)
        return self._report(started, [])

    def measure(self) -> Measures:
        return Measures.joined(self._all("measure"))

    def digests(self) -> list[str]:
        return [digest for part in self._all("digests") for digest in part]

    def _report(self, started: float, sent: list[Traffic]) -> RoundReport:
        total = time.perf_counter() - started
        seconds, steps = zip(*self._all("take_counters"), strict=True)
        slowest = {
            step: max(part.get(step, 0.0) for part in seconds)
            for step in sorted({step for part in seconds for step in part})
        }
        return RoundReport(sent, {**slowest, "total": total}, sum(steps))

    @abstractmethod
    def shared(self) -> Exchange:
        """What every client gives to a newcomer."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the parts of a checkpoint, one per block."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take every client out of a checkpoint, in whatever blocks it was written."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _all(self, command: str, *arguments: Any) -> list[Any]:
        """What every block answers, in their order."""

    @abstractmethod
    def _exchange(self, graph: Graph, header: Announcements) -> list[Announcements | None]:
        """Every block offers what it asked to, hears its neighbourhood, and goes on to its next exchange."""


def failure(error: Exception, again: str) -> str:
    """What went wrong in a process that nobody sees, in a sentence."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(f"{type(error).__name__}: {error}".split())
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return f"A worker failed with {said} ({where}). Repeat with {again} for the full traceback."
