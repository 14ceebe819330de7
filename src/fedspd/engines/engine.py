"""The interface of an engine: it trains blocks of clients, which meet at every exchange."""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from fedspd.core.errors import FedspdError, WorkerError
from fedspd.core.exchange import Exchange
from fedspd.core.graph import Graph
from fedspd.core.ledger import Traffic, traffic
from fedspd.core.mechanism import Release
from fedspd.runtime.announcements import Announcements
from fedspd.runtime.block_runner import BlockRunner
from fedspd.runtime.measures import Measures
from fedspd.runtime.plan import Plan

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class BlockLostError(WorkerError):
    """The loss of a block with its process or machine; the engine can begin or load again.

    The message is the beginning of a sentence: the caller adds whether the run continues.
    """


@dataclass(frozen=True)
class RoundReport:
    """What a round sent and took.

    traffic   what each exchange sent
    seconds   by step, of the slowest block; "total" is the time that passed
    steps     gradient steps of all clients
    releases  what each client released of its examples, if they are private
    silent    clients whose budget is spent, and how many releases each has sent
    """

    traffic: list[Traffic]
    seconds: dict[str, float]
    steps: int
    releases: dict[int, list[Release]]
    silent: dict[int, int]


class Engine(ABC):
    """All clients of a plan, in blocks.

    A command to the blocks is a method of `BlockRunner`, or of the engine's own subclass of it. A
    run calls `begin` or `load` first; either discards what the blocks held.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def begin(self) -> None:
        self._all(BlockRunner.begin)

    def round(self, round: int, graph: Graph) -> RoundReport:
        """Run one round of every client."""
        started, sent = time.perf_counter(), []
        waiting = self._all(BlockRunner.start_round, round)
        while any(announced is not None for announced in waiting):
            announcements = Announcements.merge(waiting)
            sent.append(self._traffic(graph, announcements))
            waiting = self._exchange(graph, announcements)
        return self._report(started, sent)

    def finish(self, round: int) -> RoundReport:
        """Run the final phase of every client."""
        started = time.perf_counter()
        self._all(BlockRunner.finish, round)
        return self._report(started, [])

    def measure(self) -> Measures:
        return Measures.merge(self._all(BlockRunner.measure))

    def keep_best(self) -> None:
        """Remember all states as those of the best round so far."""
        self._all(BlockRunner.keep_best)

    def take_best(self) -> None:
        """Go back to the states of the best round."""
        self._all(BlockRunner.take_best)

    def digests(self) -> list[str]:
        """Return a hash of every client's state."""
        return [digest for block in self._all(BlockRunner.digests) for digest in block]

    def state_bytes(self) -> int:
        """Return the bytes of all clients' states."""
        return sum(self._all(BlockRunner.state_bytes))

    def _traffic(self, graph: Graph, announcements: Announcements) -> Traffic:
        exchange, dtype = self.plan.exchange, self.plan.learner.dtype
        itemsize = exchange.travel_dtype(dtype, announcements.is_model).itemsize
        return traffic(
            graph,
            announcements.cluster_CK,
            announcements.want_CM,
            announcements.size * itemsize,
            announcements.is_model,
        )

    def _report(self, started: float, sent: list[Traffic]) -> RoundReport:
        total = time.perf_counter() - started
        seconds, steps = zip(*self._all(BlockRunner.take_counters), strict=True)
        names = sorted({name for block in seconds for name in block})
        slowest = {name: max(block.get(name, 0.0) for block in seconds) for name in names}
        releases: dict[int, list[Release]] = {}
        if self.plan.learner.mechanism is not None:
            for own in self._all(BlockRunner.take_releases):
                releases |= own
        silent: dict[int, int] = {}
        if self.plan.limit is not None:
            for known in self._all(BlockRunner.silent_clients):
                silent |= known
        return RoundReport(sent, {**slowest, "total": total}, sum(steps), releases, silent)

    def restore_accounts(
        self, spent: Sequence[Sequence[Release]], silent: Mapping[int, int]
    ) -> None:
        """Take what every client has released, and who sends nothing more, from a ledger."""
        self._all(BlockRunner.restore_accounts, spent, silent)

    @abstractmethod
    def share(self) -> Exchange:
        """Return what every client offers to newcomers."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the parts of a checkpoint, one per block."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read every client from a checkpoint, in whichever parts it was written."""

    @abstractmethod
    def close(self) -> None:
        """Release the blocks with their processes."""

    @abstractmethod
    def _all(
        self,
        command: Callable[Concatenate[BlockRunner, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Answer]:
        """Execute the command on every block and return the answers in the order of the blocks."""

    @abstractmethod
    def _exchange(self, graph: Graph, announcements: Announcements) -> list[Announcements | None]:
        """Give every block the models that it receives, and run it up to its next exchange."""


def split_clients(counts: Sequence[int], workers: int) -> list[range]:
    """Split clients into consecutive blocks with about the same number of examples.

    There are at most as many blocks as clients. `counts` has the examples of every client.
    """
    workers = max(1, min(workers, len(counts)))
    ends = np.cumsum(counts)
    cuts = [0]
    for w in range(1, workers):
        cut = int(np.searchsorted(ends, ends[-1] * w / workers, side="left")) + 1
        cuts.append(min(max(cut, cuts[-1] + 1), len(counts) - (workers - w)))
    return [range(low, high) for low, high in zip(cuts, [*cuts[1:], len(counts)], strict=True)]


@contextmanager
def failures_as_sentences(repeat_with: str, *passed_on: type[Exception]) -> Iterator[None]:
    """Turn an exception in a process that nobody watches into a sentence.

    repeat_with   the arguments of a run that shows the traceback
    passed_on     exceptions besides FedspdError that are raised as they are
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (FedspdError, *passed_on)):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(f"{type(error).__name__}: {error}".split())
        where = f"{Path(place.filename).name}, line {place.lineno}"
        raise WorkerError(
            f"A worker failed with {message} ({where}). Repeat with {repeat_with} for the full "
            "traceback."
        ) from None
